"""The TCP port by which the kernel of a rank's machine tells others that the rank's process still exists.

One listener per process, with a daemon thread, from the first Bagua group on. A kernel accepts connections, and answers
keepalives, also while the process is stopped, holds the GIL or compiles, so that silence of Python proves nothing here,
and silence of the kernel does. Whoever connects is told a token, which shows that it is this process, whatever address
translation is between, what the process is doing, and how long its steps compute. What others send is ignored. Others
look at it by bagua.job.peer_watch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bagua import launch_environment
from bagua.job import computing, gloo_exit
from bagua.network_interfaces import interface_addresses, source_address

ACCEPT_PAUSE_S = 1.0
STOP_S = 1.0
MAX_CONNECTIONS = 64  # to a listener; more are others' than ranks'
MAX_ADDRESSES = 8
MAX_LINE = 4096
LEFT = b"left\n"  # the last that is sent


class Door(NamedTuple):
    """Where a process can be reached, as it says."""

    addresses: tuple[str, ...] = ()
    port: int = 0
    token: str = ""


NO_DOOR = Door()


class Presence:
    """This process's listener. Any thread."""

    def __init__(self) -> None:
        self.doing: Callable[[], str] = str
        self._listener = listen()
        self._connections: list[socket.socket] = []  # of the thread
        self._selector = selectors.DefaultSelector()
        self._ending, self._end = socket.socketpair()
        for one in (self._listener, self._ending):
            self._selector.register(one, selectors.EVENT_READ)
        token = launch_environment.take_rank_token() or secrets.token_hex(8)
        self.door = Door(tuple(own_addresses())[:MAX_ADDRESSES], self._listener.getsockname()[1], token)
        self._thread = threading.Thread(target=self._serve, name="bagua-presence", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ending:
                    return
                if key.fileobj is self._listener:
                    try:
                        self._accept()
                    except OSError:  # it has gone already, or this process has too many files open
                        time.sleep(ACCEPT_PAUSE_S)
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            told = [self.door.token, self.doing()[: MAX_LINE // 8], computing.own()]
            connection.send(json.dumps(told).encode() + b"\n")
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._connections) > MAX_CONNECTIONS:
            self._drop(self._connections[0])

    def _read(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:  # dropped for another one
            return
        try:
            is_open = bool(connection.recv(MAX_LINE))
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if not is_open:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()

    def leave(self, is_failing: bool = False) -> None:
        """The process ends. The kernel answers for it until then."""
        self._end.send(b"x")
        self._thread.join(STOP_S)
        for connection in () if is_failing else tuple(self._connections):
            with contextlib.suppress(OSError):
                connection.send(LEFT)

    def close(self) -> None:
        """In a forked process, too: it is not this one, and must not keep the port open."""
        self._selector.close()
        for one in (self._listener, self._ending, self._end, *self._connections):
            one.close()


def listen() -> socket.socket:
    """At a port of its own, of all addresses of this machine."""
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # no IPv6
        listener = socket.create_server(("", 0))
    return listener


def own_addresses() -> Iterator[str]:
    """Those that others may know us by, the likeliest first, without asking a name server."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        found = [address for addresses in interface_addresses().values() for address in addresses]
    found.sort(key=lambda address: ":" in address)
    master = source_address(launch_environment.master_address())
    if master in found:
        found.insert(0, found.pop(found.index(master)))
    yield from sorted(found, key=lambda address: address.startswith("127.") or address == "::1")


_presence: Presence | None = None
_creation = threading.Lock()


def own_presence() -> Presence | None:
    """Of this process. None: it can have none, so that it is never proven to be gone."""
    global _presence
    with _creation:
        if _presence is None:
            with contextlib.suppress(OSError, RuntimeError):
                _presence = Presence()
        return _presence


@gloo_exit.before_pause
def _leave() -> None:
    if _presence is not None:
        _presence.leave(gloo_exit.is_failing())


def _forget_in_child() -> None:
    global _presence, _creation
    _creation = threading.Lock()
    if _presence is not None:
        _presence.close()
        _presence = None


os.register_at_fork(after_in_child=_forget_in_child)
