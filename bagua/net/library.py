"""Where the installed files are: the plugin library and the load driver, in wheels and in editable installs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LIBRARY_NAME = "libnccl-net.so"  # NCCL's default name for a network plugin
DRIVER_NAME = "bagua-net-driver"


class MissingFileError(RuntimeError):
    """A file of the installation is missing. The message names the paths that were tried, and the remedy."""


def package_directories() -> list[Path]:
    """The directories of the package `bagua.net`. An editable install has two: the source tree with the Python files,
    and site-packages with what was compiled."""
    import bagua.net

    return [Path(entry) for entry in bagua.net.__path__]


def library_path() -> Path:
    """
    The absolute path of the installed plugin.

    Raises:
        MissingFileError: it is not installed.
    """
    return _installed_file("lib", LIBRARY_NAME, "NCCL network plugin")


def driver_path() -> Path:
    """The absolute path of the load driver, which bagua-net-bench and the self-test run. Raises MissingFileError."""
    return _installed_file("bin", DRIVER_NAME, "load driver")


def _installed_file(folder: str, name: str, what: str) -> Path:
    candidates = [directory / folder / name for directory in package_directories()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.absolute()
    sought = ", ".join(str(candidate) for candidate in candidates)
    raise MissingFileError(
        f"the {what} {name} is not installed (sought: {sought}); install the package with `pip install .` or `pip "
        "install bagua`: a source tree on PYTHONPATH holds no compiled files"
    )


def is_same_file(left: Path, right: Path) -> bool:
    try:
        return left.samefile(right)
    except OSError:
        return False


def loader_search_path(environment: Mapping[str, str]) -> list[Path]:
    """The directories of LD_LIBRARY_PATH; an empty entry means the working directory, as for the loader."""
    value = environment.get("LD_LIBRARY_PATH", "")
    if not value:
        return []
    return [Path(entry or ".") for entry in value.replace(";", ":").split(":")]


def found_by_name(name: str, search_path: list[Path]) -> Path | None:
    """The file that the loader would take for a name without a slash, as far as LD_LIBRARY_PATH says."""
    for directory in search_path:
        candidate = directory / name
        if candidate.is_file():
            return candidate
    return None


def initial_environment() -> Mapping[str, str]:
    """The environment with which this process was started. The loader read LD_LIBRARY_PATH then, and never again."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}
