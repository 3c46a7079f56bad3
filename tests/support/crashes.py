"""Processes that end in the middle of writing files: at the n-th operation that changes the file system, by a signal
or, as if power had failed, with the loss of all that was not synced."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# Of what was not synced: the bytes of files, and all renames, or all but the last, which other blocks of the disk hold.
Lost = Literal["nothing", "all", "all but the last rename"]

_CRASHED = 9
_FAILED = 1


def crash_at(number: int, function: Callable[[], object], lost: Lost) -> bool:
    """
    Calls `function` in a child process, which ends at its operation of this number, counted from 1.

    Returns:
        False if it made fewer operations.
    """
    child = os.fork()
    if child == 0:
        try:
            disk = _Disk(number, lost)
            disk.install()
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(_FAILED)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, _CRASHED), f"the child ended with {code}"
    return code == _CRASHED


class _Disk:
    """Counts operations, and knows what a loss of power would undo."""

    def __init__(self, left: int, lost: Lost) -> None:
        self._left, self._lost = left, lost
        self._unsynced: set[str] = set()  # files
        self._renames: list[tuple[str, str, bytes | None]] = []  # from, to, the file that was there
        self._original: dict[str, Any] = {}

    def install(self) -> None:
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            self._original[name] = getattr(os, name)
        os.fsync = self._fsync
        os.rename = os.replace = self._rename
        for name in ("mkdir", "unlink", "rmdir"):
            setattr(os, name, self._counted(self._original[name]))
        self._original["open"] = io.open
        io.open = self._open  # type: ignore[assignment]  # what Path.open calls

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self._count()
            return operation(*arguments, **keywords)

        return counted

    def _count(self, at_crash: Callable[[], object] = lambda: None) -> None:
        self._left -= 1
        if self._left == 0:
            at_crash()
            self._crash()

    def _crash(self) -> None:
        if self._lost != "nothing":
            undone = self._renames if self._lost == "all" else self._renames[:-1]
            for source, target, former in reversed(undone):
                if Path(target).exists() and not Path(source).exists():
                    self._original["rename"](target, source)
                if former is not None:
                    with self._original["open"](target, "wb") as file:
                        file.write(former)
            for path in self._unsynced:
                if Path(path).exists():
                    os.truncate(path, 0)
        os._exit(_CRASHED)

    def _fsync(self, descriptor: int) -> None:
        self._count()
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if Path(path).is_dir():
            self._renames = [one for one in self._renames if str(Path(one[1]).parent) != path]
        self._unsynced.discard(path)
        self._original["fsync"](descriptor)

    def _rename(self, source: Any, target: Any) -> None:
        self._count()
        source, target = str(source), str(target)
        former = None
        if Path(target).is_file():
            with self._original["open"](target, "rb") as file:
                former = file.read()
        self._original["rename"](source, target)
        self._renames.append((source, target, former))
        moved = {path for path in self._unsynced if path == source or path.startswith(f"{source}/")}
        # Undone renames come first in a crash, so that files are truncated where they were written.
        self._unsynced |= {target + path.removeprefix(source) for path in moved}

    def _open(self, path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if "w" not in mode:
            return self._original["open"](path, mode, *arguments, **keywords)
        self._count()
        self._unsynced.add(str(path))
        return _File(self._original["open"](path, mode, *arguments, **keywords), self._count)


class _File:
    """Half of the last write reaches the file."""

    def __init__(self, file: Any, count: Callable[[Callable[[], object]], None]) -> None:
        self._file, self._count = file, count

    def write(self, data: Any) -> Any:
        def write_half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._count(write_half)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
