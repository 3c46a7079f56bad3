"""Named network namespaces: create, enter with one thread, remove; and the sweep of what dead processes left.

Each is a bind mount in /run/netns, where `ip netns` looks, so that `ip netns exec NAME ss -ti` works on a running
lab. A name carries the pid and start time of its process, and the process holds a lock on the namespace: by both
the sweep tells a dead process's namespace from a live one's, even across pid namespaces that share /run/netns.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import NetlabError, translated

_RUN_DIR = Path("/run/netns")
_NAME = re.compile(r"netlab-(?P<pid>\d+)-(?P<start>\d+)-\d+-\w+")
_TERMINATE_SECONDS = 2.0
_KILL_SECONDS = 5.0

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SHARED = 1 << 20
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount(source: str, target: Path, flags: int) -> None:
    _checked(_libc.mount(source.encode(), bytes(target), b"none", ctypes.c_ulong(flags), None))


def _start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold blanks and parentheses; field 22 is the start time.
    return int(stat.rpartition(")")[2].split()[19])


def unique_name(sequence: int, role: str) -> str:
    return f"netlab-{os.getpid()}-{_start_ticks(os.getpid())}-{sequence}-{role}"


class NetworkNamespace:
    """Owns one namespace: the name in /run/netns and an open descriptor, which holds the lock."""

    def __init__(self, name: str) -> None:
        assert _NAME.fullmatch(name), name
        self.name = name
        self.path = _RUN_DIR / name
        self._fd = -1
        with translated(f"making network namespace {name}", "CONFIG_NET_NS"):
            _prepare_run_dir()
            os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
            try:
                _in_new_thread(self._unshare_and_mount)
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                self.remove()
                raise

    def _unshare_and_mount(self) -> None:
        _checked(_libc.unshare(_CLONE_NEWNET))
        _mount("/proc/thread-self/ns/net", self.path, _MS_BIND)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is in this namespace for the duration. Sockets opened meanwhile stay in it; threads
        and processes started meanwhile begin in it."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with translated(f"entering network namespace {self.name}"):
                _checked(_libc.setns(self._fd, _CLONE_NEWNET))
            try:
                yield
            finally:
                with translated("returning to the network namespace of before"):
                    _checked(_libc.setns(before, _CLONE_NEWNET))
        finally:
            os.close(before)

    def fileno(self) -> int:
        return self._fd

    def remove(self) -> None:
        """Ends the processes that are left inside and removes the name; the kernel then removes the interfaces."""
        if self._fd >= 0:
            _end_processes_of(self._fd)
            os.close(self._fd)
            self._fd = -1
        _remove_name(self.path)


def sweep() -> list[str]:
    """Removes the namespaces of processes that ended without doing so (SIGKILL, power of the OOM killer), together
    with the processes still inside. Returns their names."""
    removed = []
    for path in sorted(_RUN_DIR.glob("netlab-*")):
        match = _NAME.fullmatch(path.name)
        if match is None or _start_ticks(int(match["pid"])) == int(match["start"]):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another sweep was faster
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_processes_of(descriptor)
            with translated(f"removing network namespace {path.name}"):
                _remove_name(path)
            removed.append(path.name)
        except BlockingIOError:
            continue  # its process lives in another pid namespace, or another sweep has it
        finally:
            os.close(descriptor)
    return removed


def _prepare_run_dir() -> None:
    """What `ip netns add` does: /run/netns is a shared mount, so that unmounting a name reaches every mount
    namespace and none keeps a removed network namespace alive. It stays, as it does after `ip netns`."""
    _RUN_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = os.open(_RUN_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held for two system calls; two processes must not both bind it
        try:
            _mount("", _RUN_DIR, _MS_SHARED | _MS_REC)
        except OSError:
            _mount(str(_RUN_DIR), _RUN_DIR, _MS_BIND | _MS_REC)
            _mount("", _RUN_DIR, _MS_SHARED | _MS_REC)
    finally:
        os.close(lock)


def _in_new_thread(action: object) -> None:
    """Runs `action` in a thread that ends afterwards: a thread that failed half-way must not go on in a namespace
    that it did not begin in."""
    assert callable(action)
    failure: list[BaseException] = []

    def body() -> None:
        try:
            action()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="netlab-unshare")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def _remove_name(path: Path) -> None:
    if _libc.umount2(bytes(path), _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        # EINVAL: not mounted (a process ended between creating the file and mounting); ENOENT: gone already.
        if number not in (22, 2):
            raise OSError(number, os.strerror(number), str(path))
    with suppress(FileNotFoundError):
        path.unlink()


def _processes_of(namespace_fd: int) -> list[int]:
    inode = os.fstat(namespace_fd).st_ino
    pids = []
    for entry in Path("/proc").iterdir():
        # Zombies, kernel threads and processes that end meanwhile have no readable namespace.
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "ns/net").stat().st_ino == inode:
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != os.getpid()]


def _signal_processes_of(namespace_fd: int, number: signal.Signals) -> None:
    for pid in _processes_of(namespace_fd):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # Looked up again behind the pidfd: the number may have been reused since the list was made.
                with suppress(OSError):
                    if Path(f"/proc/{pid}/ns/net").stat().st_ino == os.fstat(namespace_fd).st_ino:
                        signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def _end_processes_of(namespace_fd: int) -> None:
    for number, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        while _processes_of(namespace_fd):
            if time.monotonic() > deadline:
                break
            _signal_processes_of(namespace_fd, number)
            time.sleep(0.05)
        else:
            return
    left = _processes_of(namespace_fd)
    raise NetlabError(f"netlab: processes {left} did not end {_KILL_SECONDS:g} s after SIGKILL; their network stays")
