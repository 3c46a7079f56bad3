"""Watches the process of another rank, over a TCP connection to its presence (bagua.job.presence), until it is gone.

[Note: who watches whom] Each rank keeps a connection to one other rank: that of the same local rank on the next node,
or on a single node the next one. So a machine that falls silent is noticed by the node before it, and a job of n ranks
has n such connections. Their keepalives take a packet each every few seconds. Only a rank that has answered is watched:
a port that a firewall closes proves nothing.

[Note: proof] A watched rank is *gone* if its connection has ended and then, at the address where it has answered, a new
connection is refused, or is answered by another process, or if ATTEMPTS keepalives and new connections, one every
ATTEMPT_S, got no answer. Attempts are counted, not the time, which also passes while this machine is paused. Errors of
this machine (no route, no more files) count as nothing. A process that ends in the usual way says so, and is not taken
for gone: others may still be sending what it gave them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from bagua.job.computing import Computing
from bagua.job.gone import EXITED, silent_for
from bagua.job.presence import LEFT, MAX_LINE, Door

ATTEMPT_S = 5  # seconds for an answer of a kernel; retransmits a lost packet twice
ATTEMPTS = 6  # that fail before a kernel counts as silent: 30 s
NAMED_ATTEMPTS = 2  # that fail before a log line: 10 s
CONFIRMING_ATTEMPTS = 2  # of them: by new connections, after keepalives without an answer
FIRST_PAUSE_S = 0.01
STOP_S = 1.0
_PROBES_OFFSET = 3  # of tcpi_probes in struct tcp_info

_logger = logging.getLogger("bagua")


def watched_by(rank: int, world_size: int, local_world_size: int) -> int | None:
    """See [Note: who watches whom]."""
    next_node = (rank + local_world_size) % world_size
    watched = (rank + 1) % world_size if next_node == rank else next_node
    return None if watched == rank else watched


class Answer(NamedTuple):
    """Of what was tried to be reached.

    Attributes:
        state: "here", "refused", "another" (a process that is not the one meant), "mute" (its kernel answers, Python
            does not), "silent" (nothing answers) or "unknown".
        doing: what the process says that it does.
        computing: likewise, how long its steps take.
    """

    state: str
    doing: str = ""
    connection: socket.socket | None = None
    computing: Computing = Computing()


def reach(address: str, door: Door, attempt_s: float) -> Answer:
    """Connects to one of the addresses of a door. The connection is the caller's."""
    try:
        connection = socket.create_connection((address, door.port), timeout=attempt_s)
    except ConnectionRefusedError:
        return Answer("refused")
    except OSError as error:
        is_silent = isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH
        return Answer("silent" if is_silent else "unknown")
    try:
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE:
            piece = connection.recv(MAX_LINE)
            if not piece:
                raise ConnectionResetError
            line += piece
        token, doing, *rest = json.loads(line)  # an earlier version says no more
        computing = Computing(int(rest[0][0]), float(rest[0][1])) if rest else Computing()
    except TimeoutError:
        return Answer("mute", connection=connection)
    except (OSError, ValueError, TypeError, LookupError):
        connection.close()
        return Answer("unknown")
    if token != door.token:
        connection.close()
        return Answer("another")
    return Answer("here", str(doing), connection, computing)


def reach_any(door: Door, attempt_s: float) -> tuple[str, Answer]:
    """The first address that answers as it should, or the last one that does anything."""
    best = ("", Answer("silent"))
    for address in door.addresses:
        answer = reach(address, door, attempt_s)
        if answer.state == "here":
            return address, answer
        if answer.connection is not None:
            answer.connection.close()
        if answer.state == "mute":
            best = address, answer
    return best


class PeerWatch:
    """
    Watches one other process until it ends or is found to be gone. Owns a daemon thread.

    Args:
        name: for log lines: "rank 3 (host b)".
        on_gone: called, on the thread, with how: "exited", for example.
        has_failed: whether it is known otherwise that the process has ended; for one that cannot be reached at first.
        attempt_s, attempts: see [Note: proof].
    """

    def __init__(
        self,
        door: Door,
        name: str,
        on_gone: Callable[[str], None],
        has_failed: Callable[[], bool],
        attempt_s: int,
        attempts: int,
    ) -> None:
        self._door, self._name, self._on_gone, self._has_failed = door, name, on_gone, has_failed
        self._attempt_s, self._attempts = attempt_s, attempts
        self._connection: socket.socket | None = None
        self._is_named = False  # as silent
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua-peer-watch", daemon=True)
        _watches.append(self)
        self._thread.start()

    def stop(self, *, waits: bool = True) -> None:
        """Ends the thread, soon.

        Args:
            waits: for its end, STOP_S at most.
        """
        self._is_stopped.set()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if waits and threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)
        with contextlib.suppress(ValueError):
            _watches.remove(self)

    def close(self) -> None:
        """In a forked process, which has no such thread."""
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        address, connection = self._reach_first()
        while connection is not None:
            self._connection = connection
            attempts = self._watch(connection)
            connection.close()
            connection = self._reach_again(address, attempts) if attempts else None

    def _reach_first(self) -> tuple[str, socket.socket | None]:
        """The address that answers. None: the process is gone, or cannot be reached from here."""
        # A healthy process may be late: it holds the GIL while it loads a model, or its first packets are lost.
        for _ in range(self._attempts if self._door.addresses else 1):
            begin = time.monotonic()
            address, answer = reach_any(self._door, self._attempt_s)
            if answer.state == "here":
                return address, answer.connection
            if self._has_failed():
                self._on_gone(EXITED)
                return "", None
            if self._is_stopped.wait(begin + self._attempt_s - time.monotonic()):
                return "", None
        _logger.info(f"{self._name} cannot be reached at port {self._door.port}; nobody watches its machine.")
        return "", None

    def _watch(self, connection: socket.socket) -> int:
        """Until it is lost. Returns how many attempts without an answer are a proof then; 0: the process has left."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, self._attempt_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, self._attempts - CONFIRMING_ATTEMPTS)
        connection.settimeout(self._attempt_s)
        while not self._is_stopped.is_set():
            try:
                piece = connection.recv(MAX_LINE)
            except TimeoutError as error:
                if error.errno == errno.ETIMEDOUT:  # the keepalives'
                    return CONFIRMING_ATTEMPTS
                self._name_silence(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_PROBES_OFFSET])
                continue
            except OSError:
                piece = b""
            if piece.endswith(LEFT):
                break
            if not piece:
                return self._attempts
        return 0

    def _name_silence(self, unanswered: int) -> None:
        """After so many attempts in a row."""
        if unanswered >= NAMED_ATTEMPTS and not self._is_named:
            self._is_named = True
            _logger.warning(
                f"{self._name} {silent_for(unanswered * self._attempt_s)}: its machine or the"
                f" network is down. The job ends if that lasts {self._attempts * self._attempt_s} s."
            )
        elif self._is_named and not unanswered:
            self._is_named = False
            _logger.warning(f"{self._name} answers again.")

    def _reach_again(self, address: str, attempts: int) -> socket.socket | None:
        """None: the process is gone, or nobody wants to know."""
        # A process that is being killed closes its connections before its port: who is fast is accepted once more.
        pause = FIRST_PAUSE_S
        while not self._is_stopped.is_set():
            begin = time.monotonic()
            answer = reach(address, self._door, self._attempt_s)
            if answer.connection is not None:
                return answer.connection
            if answer.state == "silent":
                attempts -= 1
                self._name_silence(self._attempts - attempts)
            if answer.state in ("refused", "another"):
                self._on_gone(EXITED)
                break
            if not attempts:
                self._on_gone(silent_for(self._attempts * self._attempt_s))
                break
            self._is_stopped.wait(begin + min(pause, self._attempt_s) - time.monotonic())
            pause = 2 * pause if answer.state == "unknown" else self._attempt_s
        return None


_watches: list[PeerWatch] = []


def _forget_in_child() -> None:
    for watch in _watches:
        watch.close()


os.register_at_fork(after_in_child=_forget_in_child)
