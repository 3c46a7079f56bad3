"""The values of NCCL_NET_PLUGIN and NCCL_NET: what ours must be, and whether somebody else's names our library."""

from __future__ import annotations

import os
from pathlib import Path

from bagua.net.library import LIBRARY_NAME, found_by_name, is_same_file

PLUGIN_NAME = "BaguaNet"  # what NCCL_NET is compared with, and what NCCL's log says

# NCCL copies the name of a plugin into char[255].
_MAX_PLUGIN_BYTES = 254


class PluginPathError(RuntimeError):
    """NCCL cannot load a plugin from this path. The message says why and what to do."""


def plugin_value(library: Path) -> str:
    """What NCCL_NET_PLUGIN has to be. Raises PluginPathError for a path that NCCL would cut or split."""
    length = len(os.fsencode(library))
    if length > _MAX_PLUGIN_BYTES:
        raise PluginPathError(
            f"the path of the plugin, {library}, is {length} bytes long; NCCL reads at most {_MAX_PLUGIN_BYTES}\n"
            "Install bagua in a directory with a shorter name, or use `bagua-net run --by-name -- CMD`."
        )
    for character, name in ((",", "comma"), ("\n", "line feed")):
        if character in str(library):
            raise PluginPathError(
                f"the path of the plugin, {str(library)!r}, contains a {name}, where NCCL would cut it\n"
                "Install bagua in another directory, or use `bagua-net run --by-name -- CMD`."
            )
    return str(library)


def names_library(value: str, library: Path, search_path: list[Path]) -> bool:
    """Whether a value of NCCL_NET_PLUGIN, which since NCCL 2.27 may be a list, leads to our library."""
    return any(_entry_names_library(entry, library, search_path) for entry in value.split(","))


def _entry_names_library(entry: str, library: Path, search_path: list[Path]) -> bool:
    if not entry:
        return False
    if "/" in entry:
        return is_same_file(Path(entry), library)
    for name in (entry, f"libnccl-net-{entry}.so"):
        found = found_by_name(name, search_path)
        if found is not None:
            return is_same_file(found, library)
    return False


def default_name_finds(library: Path, search_path: list[Path]) -> bool:
    """Whether a NCCL without NCCL_NET_PLUGIN opens our library, since it lies first in LD_LIBRARY_PATH."""
    found = found_by_name(LIBRARY_NAME, search_path)
    return found is not None and is_same_file(found, library)


def is_our_name(value: str) -> bool:
    return value.casefold() == PLUGIN_NAME.casefold()
