"""The pages of the Python API: each has an example, and none shows a private name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import griffe
from support.page_programs import REPOSITORY, blocks_of

FOLDER = REPOSITORY / "docs" / "reference" / "api"
PAGES = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "index.md")
PRIVATE = re.compile(r"(?<!\w)_[A-Za-z]\w*")
# What Python calls by itself. Iteration and length are for users, too.
PROTOCOLS = {"__getstate__", "__setstate__", "__reduce__", "__deepcopy__"}


@functools.cache
def _package() -> Any:
    return griffe.GriffeLoader(search_paths=[str(REPOSITORY)], allow_inspection=False).load("bagua")


def _shown(found: Any) -> Iterator[Any]:
    """The functions of a module or class that its page describes."""
    exported = found.exports if found.is_module else None
    for name, member in found.members.items():
        if member.is_alias:
            if not exported or name not in exported:
                continue
            member = member.final_target
        if member.is_module or (name.startswith("_") and name not in PROTOCOLS) or not member.has_docstring:
            continue
        if member.is_class:
            yield from _shown(member)
        if member.is_class or member.is_function:
            yield member


def test_every_page_has_an_example() -> None:
    assert [page for page in PAGES if not blocks_of(f"docs/reference/api/{page}")] == []


def test_no_page_shows_private_names() -> None:
    assert [one for page in PAGES for one in _private_names(page)] == []


def _private_names(page: str) -> list[str]:
    wrong = []
    package = _package()
    for path in re.findall(r"^::: (\S+)", (FOLDER / page).read_text(), re.MULTILINE):
        for member in _shown(package[path.removeprefix("bagua.")]):
            if member.name in PROTOCOLS:
                wrong.append(f"{member.path} has a docstring, and is shown: make it a comment")
            texts = [
                str(text) for one in member.parameters for text in (one.annotation, one.default) if text is not None
            ]
            wrong += [f"{member.path}: {text}" for text in texts if PRIVATE.search(text)]
    return wrong
