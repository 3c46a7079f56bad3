"""Checks of output paths, before a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bagua.net.bench.errors import UsageError


def check_writable(option: str, path: Path) -> None:
    """Raise before the run, so that minutes of measuring are not lost to a misspelt folder."""
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {str(path)!r}: folder {str(path.parent)!r} does not exist; create it first")
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {str(path)!r} cannot be written ({error.strerror}); choose a path that you may write"
        ) from error


def check_output_files(outputs: Sequence[tuple[str, Path | None]]) -> None:
    """`check_writable` for each option, and no two may name the same file: the later would overwrite the earlier."""
    options: dict[Path, str] = {}
    for option, path in outputs:
        if path is None:
            continue
        check_writable(option, path)
        # Not of a device, such as /dev/null.
        if path.is_file() and (other := options.setdefault(path.resolve(), option)) != option:
            raise ValueError(f"{other} and {option} both name {str(path)!r}; give each a file of its own")


def check_outputs(json_path: Path | None, csv_path: Path | None) -> None:
    """--json and --csv, on rank 0 only: the other hosts need not have those folders. Raises UsageError."""
    try:
        check_output_files((("--json", json_path), ("--csv", csv_path)))
    except ValueError as error:
        raise UsageError(str(error)) from error


def make_folder(option: str, path: Path) -> None:
    """Raises as `check_writable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} cannot be created ({error.strerror}); choose another") from error
