"""Network namespaces: made, entered by one thread, and removed together with the processes inside.

They have no name: the descriptor that a lab holds keeps each alive, and so do processes in it. None outlives a lab
whose process is killed, unless a process that detached itself still runs there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import NetlabError, translated

_OWN = "/proc/thread-self/ns/net"
_TERMINATE_SECONDS = 2.0
_KILL_SECONDS = 5.0
_CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class NetworkNamespace:
    """Owns one namespace, by an open descriptor."""

    def __init__(self) -> None:
        self._fd = -1
        with translated("making a network namespace", "CONFIG_NET_NS"):
            failure: list[OSError] = []

            def make() -> None:
                try:
                    _checked(_libc.unshare(_CLONE_NEWNET))
                    self._fd = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    failure.append(error)

            # A thread that ends afterwards, in the namespace that it has made.
            thread = threading.Thread(target=make, name="netlab-unshare")
            thread.start()
            thread.join()
            if failure:
                raise failure[0]

    @property
    def path(self) -> Path:
        """For other programs, such as `nsenter --net=PATH`, while this process runs."""
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is in this namespace for the duration. Sockets opened meanwhile stay in it; threads
        and processes started meanwhile begin in it."""
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with translated("entering a network namespace"):
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
        """Ends the processes that are left inside; the kernel then removes the interfaces."""
        for number, seconds in ((signal.SIGTERM, _TERMINATE_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            deadline = time.monotonic() + seconds
            while self._processes() and time.monotonic() <= deadline:
                self._signal_processes(number)
                time.sleep(0.05)
        left = self._processes()
        os.close(self._fd)
        if left:
            raise NetlabError(
                f"netlab: processes {left} did not end {_KILL_SECONDS:g} s after SIGKILL; their network stays"
            )

    def _processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            # Zombies, kernel threads and processes that end meanwhile have no readable namespace.
            with suppress(OSError):
                if entry.name.isdigit() and self._has(int(entry.name)):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def _has(self, pid: int) -> bool:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino == os.fstat(self._fd).st_ino

    def _signal_processes(self, number: signal.Signals) -> None:
        for pid in self._processes():
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                try:
                    # Looked up again behind the pidfd: the number may have been reused since the list was made.
                    with suppress(OSError):
                        if self._has(pid):
                            signal.pidfd_send_signal(descriptor, number)
                finally:
                    os.close(descriptor)
