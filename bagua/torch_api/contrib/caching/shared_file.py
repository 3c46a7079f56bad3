"""A file that the processes of a node share: their lock, with a deadline, and a note of how its last writer left it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.002
_SEAL_LENGTH = 100


@contextlib.contextmanager
def locked_file(path: Path, timeout_s: float) -> Iterator[None]:
    """
    The kernel releases the lock of a process that has ended.

    Raises:
        TimeoutError: others held the lock all the time.
        OSError: the file cannot be opened.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # flock has no time-out of its own
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {timeout_s} s") from None
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            # Not by closing alone: a child that was forked meanwhile has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)


class FileSeal:
    """Inode, size and time of the last change of `data`, in a small file, so that what anything else does
    to it is noticed. Used under the writers' lock.

    A writer that is killed leaves no new seal. The same goes for whoever copies, cuts or overwrites the file.
    """

    def __init__(self, data: Path, seal: Path) -> None:
        self._data = data
        self._seal = seal

    def write(self) -> None:
        """The file is as it should be now. Overwrites in place, which a full disk does not prevent."""
        file = os.open(self._seal, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, self._text().encode(), 0)
        finally:
            os.close(file)

    def matches(self) -> bool:
        """Whether nobody has changed the file since."""
        try:
            return self._seal.read_text() == self._text()
        except (FileNotFoundError, UnicodeDecodeError):
            return False

    def _text(self) -> str:
        found = self._data.stat()
        return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}".ljust(_SEAL_LENGTH)
