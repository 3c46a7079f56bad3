"""Types of command line arguments that all parsers of bagua-net-bench share: numbers within limits, and sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from bagua.net.bench.sizes import parse_size

_Number = TypeVar("_Number", int, float)


def within(kind: Callable[[str], _Number], low: _Number, high: _Number) -> Callable[[str], _Number]:
    """An int or float (`kind`) from `low` to `high`, both included."""
    nouns: dict[object, str] = {int: "an integer"}
    noun = nouns.get(kind, "a number")

    def convert(text: str) -> _Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}; give one in {low}..{high}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is outside {low}..{high}; give {noun} in that range")
        return value

    return convert


def byte_size(text: str) -> int:
    """`64K`, `1M`: bytes, powers of 1024."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
