"""Notes how a file was when its last writer had finished, so that what anything else did to it is noticed."""

from __future__ import annotations

import os
from pathlib import Path

_LENGTH = 100


class FileSeal:
    """Inode, size and time of the last change of `data`, in a small file. Used under the writers' lock.

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
        return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}".ljust(_LENGTH)
