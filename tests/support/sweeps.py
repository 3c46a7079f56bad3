"""Sweeps over combinations, of which `make test` runs some, and `make deep` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def each_value_once(*lists: Sequence[Any]) -> list[Any]:
    """All combinations, for `parametrize`. `make test` runs as many of them as the longest list has values, and so each
    value at least once; `make deep` runs the others."""
    first = {tuple(number % len(one) for one in lists) for number in range(max(map(len, lists)))}
    return [
        pytest.param(*(one[index] for one, index in zip(lists, place, strict=True)), marks=_marks(place in first))
        for place in itertools.product(*(range(len(one)) for one in lists))
    ]


def rest_is_deep(values: Sequence[Any], *chosen: int) -> list[Any]:
    """
    Args:
        values: of one argument, or tuples of several.
        chosen: positions of those that `make test` runs.
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=_marks(number in chosen))
        for number, value in enumerate(values)
    ]


def pool_of(size: int) -> pytest.MarkDecorator:
    """For tests with the fixture `pool`, of 2 or 3 ranks; `make deep` has the other number."""
    sizes = [2, 3]
    return pytest.mark.parametrize("pool", rest_is_deep(sizes, sizes.index(size)), ids="{} ranks".format, indirect=True)


def _marks(is_default: bool) -> list[pytest.MarkDecorator]:
    return [] if is_default else [pytest.mark.deep]
