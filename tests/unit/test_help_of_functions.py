"""What help() shows of the public functions: their own names, and defaults that can be read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import bagua.comm_hooks
import bagua.lightning
import bagua.torch_api
from bagua.torch_api import communication

MODULES = (
    *(bagua.torch_api, communication, bagua.torch_api.algorithms, bagua.torch_api.checkpoint, bagua.torch_api.contrib),
    *(bagua.torch_api.data_parallel, bagua.torch_api.env, bagua.torch_api.moe, bagua.torch_api.utils),
    *(bagua.comm_hooks, bagua.lightning),
)


def public() -> Iterator[tuple[str, Any]]:
    for module in MODULES:
        for name in dir(module):
            found = getattr(module, name)
            if not name.startswith("_") and str(getattr(found, "__module__", "")).startswith("bagua."):
                yield name, found
                if inspect.isclass(found):
                    yield from ((one.__name__, one) for one in vars(found).values() if inspect.isfunction(one))


@pytest.mark.parametrize("name", [name for name in dir(bagua.torch_api) if callable(getattr(bagua.torch_api, name))])
def test_functions_name_themselves(name: str) -> None:
    assert getattr(bagua.torch_api, name).__name__ == name


def test_defaults_can_be_read() -> None:
    signatures = [(name, str(inspect.signature(one))) for name, one in public() if inspect.isroutine(one)]
    assert len(signatures) > 100
    assert [(name, text) for name, text in signatures if " at 0x" in text] == []
