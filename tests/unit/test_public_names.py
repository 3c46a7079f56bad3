"""What `help` and tracebacks show of bagua.torch_api; ruff checks its docstrings."""

from __future__ import annotations

import inspect

import bagua.torch_api

PUBLIC = {name: getattr(bagua.torch_api, name) for name in dir(bagua.torch_api)}


def test_functions_name_themselves() -> None:
    assert {name: one.__name__ for name, one in PUBLIC.items() if callable(one) and one.__name__ != name} == {}


def test_defaults_can_be_read() -> None:
    classes = [one for one in PUBLIC.values() if inspect.isclass(one)]
    functions = [*PUBLIC.values(), *(member for one in classes for member in vars(one).values())]
    signatures = [f"{one.__qualname__}{inspect.signature(one)}" for one in functions if inspect.isfunction(one)]
    assert "allreduce(" in "".join(signatures)
    assert [text for text in signatures if " at 0x" in text] == []
