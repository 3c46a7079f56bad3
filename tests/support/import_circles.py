"""Modules that import each other in a circle, read from the sources."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from support.import_arrows import imports_of_file, module_name, python_files


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """One circle, from a module to itself; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def imports_within(*folders: str) -> dict[str, set[str]]:
    """For each module of these folders of the package, those of them that it imports at any time."""
    files = {module_name(path): path for path in python_files(*folders)}
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        named = {one.module for one in imports_of_file(path)}
        named |= {name.rpartition(".")[0] for name in named}  # of a name in a module
        found[module] = (named & files.keys()) - {module}
    return found
