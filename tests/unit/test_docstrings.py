"""Every public name of bagua.torch_api says what it is, and what it raises: the reference of `make docs` is this. The
names are read from the modules as they are, the exceptions from their sources."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import bagua.torch_api

PACKAGE = "bagua.torch_api"


def modules() -> list[str]:
    package = importlib.import_module(PACKAGE)
    return [PACKAGE, *(found.name for found in pkgutil.walk_packages(package.__path__, PACKAGE + "."))]


def public_objects(module: Any) -> Iterator[tuple[str, Any]]:
    """What the module offers: what it names in `__all__`, or else what it defines itself."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value) or inspect.isroutine(value):
            yield name, value
            if inspect.isclass(value):
                yield from ((f"{name}.{member}", function) for member, function in members(value))


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that Bagua's classes define, and the constructor."""
    for owner in reversed(kind.__mro__):
        if not owner.__module__.startswith("bagua."):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, classmethod | staticmethod):
                value = value.__func__
            if isinstance(value, property):
                value = value.fget
            if inspect.isfunction(value) or isinstance(inspect.getattr_static(value, "__doc__", None), str):
                yield name, value


@functools.cache  # not while tests are collected, which every worker does
def everything() -> list[tuple[str, str, Any]]:
    seen: set[int] = set()
    found = []
    for module_name in modules():
        for name, value in public_objects(importlib.import_module(module_name)):
            if id(value) not in seen:
                seen.add(id(value))
                found.append((module_name, name, value))
    return found


def documentation(module_name: str, name: str, value: Any) -> str:
    """The docstring; of a method that overrides one, that of the base; of a constructor, its class's."""
    holder, _, member = name.rpartition(".")
    own = inspect.getdoc(value) or ""
    if not holder:
        return own
    kind = getattr(importlib.import_module(module_name), holder)
    if member == "__init__":
        return "\n".join([own, *(base.__doc__ or "" for base in kind.__mro__ if base.__module__.startswith("bagua."))])
    inherited = next((base.__dict__[member] for base in kind.__mro__[1:] if member in base.__dict__), None)
    return own or inspect.getdoc(inherited) or ""


def raised_by(function: Callable[..., Any]) -> set[str]:
    """Names of the exception classes that its own `raise` statements name."""
    if not inspect.isfunction(function) or function.__code__.co_filename == "<string>":  # a dataclass's constructor
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        exception = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        text = ast.unparse(exception).rpartition(".")[2]
        if text[0].isupper():
            names.add(text)
    return names


def is_told(exception: str, text: str, function: Any) -> bool:
    """Whether `text` says that this exception, or one that it is a kind of, is raised."""
    if not re.search(r"\bRaises\b|^\w+Error:|\. \w+Error:", text, re.MULTILINE):
        return False
    kind = getattr(builtins, exception, None) or getattr(sys.modules[function.__module__], exception, None)
    names = {base.__name__ for base in kind.__mro__} if isinstance(kind, type) else {exception}
    return bool((names - {"Exception", "BaseException", "object"}) & set(re.findall(r"\w+", text)))


def untold_exceptions(module_name: str, name: str, value: Any) -> list[str]:
    text = documentation(module_name, name, value)
    # A module of many functions may say it once for all.
    general = sys.modules[value.__module__].__doc__ or "" if inspect.isfunction(value) else ""
    return sorted(one for one in raised_by(value) if not is_told(one, text, value) and not is_told(one, general, value))


def test_the_names_are_found() -> None:
    names = {f"{module_name}:{name}" for module_name, name, _ in everything()}
    assert {
        "bagua.torch_api:allreduce",
        "bagua.torch_api:BaguaModule.with_bagua",
        "bagua.torch_api.env:get_node_rank",
        "bagua.torch_api.algorithms:AlgorithmImpl.init_tensors",
    } <= names


def test_every_module_has_a_docstring() -> None:
    assert [name for name in modules() if not importlib.import_module(name).__doc__] == []


def test_everything_public_has_a_docstring() -> None:
    silent = [
        f"{module_name}: {name}"
        for module_name, name, value in everything()
        if not name.endswith(".__init__") and not documentation(module_name, name, value).strip()
    ]
    assert not silent, "\n" + "\n".join(silent)


def test_what_is_raised_is_told() -> None:
    untold = [
        f"{module_name}: {name} raises {', '.join(exceptions)}"
        for module_name, name, value in everything()
        if (exceptions := untold_exceptions(module_name, name, value))
    ]
    assert not untold, "\n" + "\n".join(untold)


@pytest.mark.parametrize("name", [name for name in dir(bagua.torch_api) if callable(getattr(bagua.torch_api, name))])
def test_functions_name_themselves(name: str) -> None:
    assert getattr(bagua.torch_api, name).__name__ == name


def test_defaults_can_be_read() -> None:
    signatures = [(name, str(inspect.signature(one))) for _, name, one in everything() if inspect.isfunction(one)]
    assert len(signatures) > 100
    assert [(name, text) for name, text in signatures if " at 0x" in text] == []


def silent_function() -> None:
    raise ValueError("x")


def vague_function() -> None:
    """Raises TypeError: sometimes."""
    raise ValueError("x")


def general_function() -> None:
    """Something.

    Raises:
        LookupError: no such key.
    """
    raise KeyError("x")


class TestReader:
    """The checks above find what they must find."""

    @pytest.mark.parametrize(
        ("function", "exceptions"),
        [(silent_function, ["ValueError"]), (vague_function, ["ValueError"]), (general_function, [])],
    )
    def test_exceptions(self, function: Callable[[], None], exceptions: list[str]) -> None:
        assert untold_exceptions(__name__, function.__name__, function) == exceptions
