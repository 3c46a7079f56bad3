"""An LMDB environment that a process may use whatever happened to its files, and after a fork.

LMDB maps its file. What it does not survive is handled here:
- The environment of the parent must not be used in a forked child, nor be copied in the middle of a transaction. A fork
  waits for transactions of other threads, and the child opens its own environment when it needs one.
- A process may open an environment once. All stores of a path share one.
- LMDB trusts its file: damage can make it end the process. A file that somebody else has changed, or that a killed
  writer left, is verified before it is used.
- What is damaged later, or is wrong in the part of a page that nobody has verified, may lead to a part of the map that
  is behind the end of the file: SIGBUS. So the file is as long as the map; it is sparse, and takes the space of what
  was written.
- LMDB writes to a map of its lock file, too. On a full disk that is SIGBUS, unless the file has all its space before.
- A file that is removed, replaced or cut while it is open is noticed before each use.
- A writer that is stopped would keep all others waiting without a deadline in LMDB's own lock. A lock on a file with a
  deadline is taken first, so that LMDB's is always free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bagua.contrib.caching.store import Retries, StoreError
from bagua.misuse import import_optional

_LOCK_TIMEOUT_S = 10.0
_MAX_READERS = 1024
# More than the lock file needs: 64 bytes for each reader and a head. LMDB leaves a longer file as it is.
_LOCK_FILE_BYTES = 64 * _MAX_READERS + 8192
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# What LMDB raises when it finds its file damaged.
_DAMAGE = (
    *("BadDbiError", "BadTxnError", "BadValsizeError", "CorruptedError", "CursorFullError", "IncompatibleError"),
    *("InvalidError", "InvalidParameterError", "MemoryError", "NotFoundError", "PageFullError", "PageNotFoundError"),
    *("PanicError", "VersionMismatchError"),
)

_environments: weakref.WeakValueDictionary[str, SharedEnvironment] = weakref.WeakValueDictionary()
_registry = threading.RLock()  # guards _environments and _forking
_forking: list[SharedEnvironment] = []


def _before_fork() -> None:
    _registry.acquire()
    _forking.extend(_environments.values())
    for environment in _forking:
        environment.lock.acquire()


def _after_fork_in_parent() -> None:
    while _forking:
        _forking.pop().lock.release()
    _registry.release()


def _after_fork_in_child() -> None:
    global _registry
    _registry = threading.RLock()
    while _forking:
        _forking.pop().forget()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def shared_environment(path: Path, map_bytes: int) -> SharedEnvironment:
    """The environment of `path` in this process, with room for at least `map_bytes`.

    Raises:
        OSError: the folder cannot be made, or not be written to. That a disk is full is for the first use to say, and
            is a miss: there may be room by then.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        reason = f"path={str(path)!r} cannot be the folder of a cache: it, or a folder above it, is a file"
        raise type(error)(error.errno, f"{reason}. Pass another path.") from None
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise OSError(error.errno, _unusable(path, error.errno)) from None
    else:
        if not os.access(path, os.W_OK | os.X_OK):
            number = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(number, _unusable(path, number))
    name = str(path.resolve())
    with _registry:
        environment = _environments.get(name)
        if environment is None:
            environment = _environments[name] = SharedEnvironment(Path(name))
    environment.request(map_bytes)
    return environment


def _unusable(path: Path, number: int | None) -> str:
    why = os.strerror(number or errno.EIO)
    return f"path={str(path)!r} cannot be the folder of a cache: {why}. Pass a path that this user can write to."


class DamagedError(Exception):
    """What the verification found, or whoever reads: the cache is replaced by an empty one."""


class SharedEnvironment:
    """
    Args:
        path: the folder; nothing else may be in it.
    """

    def __init__(self, path: Path) -> None:
        self.lmdb = import_optional("lmdb", "backend='lmdb'")
        self.path = path
        self._data = path / "data.mdb"
        self._map_bytes = 0
        self._verifier = import_optional("lmdb.verify", "backend='lmdb'")  # of version 3
        self._seal = FileSeal(self._data, path / "seal")
        self._damage = (DamagedError, *(getattr(self.lmdb, name) for name in _DAMAGE))
        self._opened: Any = None
        self._file: tuple[int, int] | None = None
        self._opened_bytes = 0
        self._databases: dict[bytes, Any] = {}
        self._retries = Retries(_LOCK_TIMEOUT_S)
        self.lock = threading.RLock()

    def forget(self) -> None:
        """In a forked child. LMDB's locks and reader slots are the parent's by its process id: closing leaves them."""
        self.lock = threading.RLock()
        self._close()

    def request(self, map_bytes: int) -> None:
        """Have room for at least so much."""
        with self.lock:
            if map_bytes > self._map_bytes:
                self._close()
                self._map_bytes = map_bytes

    @contextlib.contextmanager
    def reading(self) -> Iterator[tuple[Any, dict[bytes, Any]]]:
        """A read transaction, and the databases by name.

        Raises:
            StoreError: the files are damaged or gone. They are replaced by empty ones.
        """
        with self.lock, self._errors():
            if not self._is_current():
                with self._file_lock():
                    self._open()
            with self._opened.begin(buffers=True) as transaction:
                yield transaction, self._databases

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[Any, dict[bytes, Any]]]:
        """A write transaction, committed at the end. See `reading`.

        Raises:
            StoreError: also if another process does not end its own.
        """
        with self.lock, self._errors(), self._file_lock():
            if not self._is_current():
                self._open()
            elif not self._seal.matches():
                self._verify()
            try:
                with self._opened.begin(write=True, buffers=True) as transaction:
                    yield transaction, self._databases
            except self._damage:
                raise
            except BaseException:
                self._seal.write()  # what was committed before is as it was
                raise
            self._seal.write()

    def _verify(self) -> None:
        # Under the file lock, so that nobody writes.
        try:
            problems = self._verifier.verify(str(self.path), subdir=True)
        except self._verifier.VerifyError as error:
            problems = [str(error)]
        if problems:
            raise DamagedError(problems[0])

    @contextlib.contextmanager
    def _file_lock(self) -> Iterator[None]:
        self._retries.check()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with locked_file(self.path / "writer.lock", _LOCK_TIMEOUT_S):
                yield
        except TimeoutError as error:
            raise self._retries.failed(
                f"The cache cannot be written: {error}.\nIt is in {self.path}.\n"
                "Another process may verify a large cache; if this goes on, look for one that is stopped."
            ) from error

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self.lmdb.MapFullError:
            raise
        except self._damage as error:
            self._replace()
            raise StoreError(
                f"The cache was damaged ({error}), and is empty now.\nIt is in {self.path}.\n"
                "If this happens again, check the disk; LMDB does not work on network file systems."
            ) from error
        except (self.lmdb.Error, OSError) as error:
            self._close()
            raise StoreError(
                f"The cache cannot be used ({error}).\nIt is in {self.path}{self._free_space()}.\n"
                "Free space there, check permissions, quotas and limits, or pass another path."
            ) from error

    def _free_space(self) -> str:
        """In words; nothing if it is not known."""
        with contextlib.suppress(OSError):
            found = os.statvfs(next(one for one in (self.path, *self.path.parents) if one.exists()))
            return f", where {found.f_bavail * found.f_frsize / (1 << 20):.1f} MiB are free"
        return ""

    def _is_current(self) -> bool:
        """
        Raises:
            StoreError: the files of an open environment are gone or cut.
        """
        if self._opened is None:
            return False
        try:
            found = self._data.stat()
        except FileNotFoundError:
            found = None
        if found is not None and (found.st_dev, found.st_ino) == self._file and found.st_size >= self._opened_bytes:
            return True
        self._close()
        raise StoreError(
            f"The cache was removed or cut while it was in use.\nIt is in {self.path}.\n"
            "It is opened again. Remove a cache only when no job uses it, or call its store's clear()."
        )

    def _open(self) -> None:
        """Under the file lock."""
        try:
            self._open_files()
        except self._damage:
            self._close()
            self._file = self._identity()
            raise

    def _open_files(self) -> None:
        size = self._data.stat().st_size if self._data.exists() else 0
        map_bytes = max(size, self._map_bytes)
        if size and not self._seal.matches():
            self._verify()
        if 0 < size < map_bytes:
            os.truncate(self._data, map_bytes)
        self._allocate_lock_file()
        self._opened = self.lmdb.open(
            str(self.path),
            map_size=map_bytes,
            mode=0o600,
            max_dbs=2,
            max_readers=_MAX_READERS,
            # A crash of the machine may lose the last transaction, but not damage others.
            metasync=False,
            readahead=False,
            meminit=False,
        )
        self._databases = {name: self._opened.open_db(name) for name in (b"entries", b"order")}
        if size < map_bytes:
            os.truncate(self._data, map_bytes)
        self._file, self._opened_bytes = self._identity(), map_bytes
        self._seal.write()

    def _allocate_lock_file(self) -> None:
        """Not while this process has it open: closing it would end LMDB's locks on it."""
        file = os.open(self.path / "lock.mdb", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(file)
            wanted = max(found.st_size, _LOCK_FILE_BYTES)
            if found.st_blocks * 512 < wanted:
                os.posix_fallocate(file, 0, wanted)
        finally:
            os.close(file)

    def _replace(self) -> None:
        """Remove damaged files, unless another process has done so."""
        mine = self._file
        self._close()
        try:
            with locked_file(self.path / "writer.lock", _LOCK_TIMEOUT_S):
                if mine is not None and self._identity() == mine:
                    for name in ("data.mdb", "lock.mdb"):
                        (self.path / name).unlink(missing_ok=True)
        except OSError:  # the next use says why
            pass

    def _identity(self) -> tuple[int, int]:
        found = self._data.stat()
        return found.st_dev, found.st_ino

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = self._file = None

    def forget_killed_readers(self) -> None:
        """What they read when they were killed would not be overwritten."""
        with self.lock, self._errors():
            if self._is_current():
                self._opened.reader_check()

    def close(self) -> None:
        """The next use opens it again."""
        with self.lock:
            self._close()


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
