"""What one connection of Multipath TCP (RFC 8684) carries over all NICs, where the kernel has it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

from netlab import Lab

from measure.nics.nic_set import HOSTS, NicSet

_ENABLED = Path("/proc/sys/net/mptcp/enabled")
_IPPROTO_MPTCP = 262
_BLOCK, _FIRST = bytes(1 << 20), bytes(1 << 12)
# Of an address: told to the other end, which then opens a path to it (linux/mptcp.h).
_FLAG_SIGNAL = 1
# Until further paths of a connection are there.
_JOIN_SECONDS = 0.5
_DEADLINE_S = 20.0


def missing_mptcp() -> str | None:
    if not _ENABLED.exists():
        return "no MPTCP in this kernel (CONFIG_MPTCP)"
    return None if _ENABLED.read_text().strip() == "1" else "MPTCP is switched off (net.mptcp.enabled)"


def mptcp_rate(nic_set: NicSet, lab: Lab, seconds: float) -> float:
    """Bytes per second of each direction, with one connection for each direction at the same time.

    Raises:
        OSError: it cannot be used here.
    """
    from pyroute2 import MPTCP

    further = len(nic_set.nics) - 1
    for host in range(HOSTS):
        with lab.inside(host), MPTCP() as paths:
            paths.limits("set", subflows=further, rcv_add_addrs=further)
            for nic in range(1, further + 1):
                paths.endpoint("add", addr=lab.hosts[host].address(nic), flags=_FLAG_SIGNAL)
    rates: list[float] = []
    with contextlib.ExitStack() as sockets:

        def opened(host: int) -> socket.socket:
            with lab.inside(host):
                one = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM, _IPPROTO_MPTCP))
            one.settimeout(_DEADLINE_S)
            return one

        clients, receivers = [], []
        for host in range(HOSTS):
            listener, client = opened(host), opened(1 - host)
            listener.bind(("0.0.0.0", 0))  # also for the further addresses
            listener.listen()
            client.connect((lab.hosts[host].address(), listener.getsockname()[1]))
            server = sockets.enter_context(listener.accept()[0])
            server.settimeout(_DEADLINE_S)
            client.sendall(_FIRST)  # paths are added to a connection that carries data
            clients.append(client)
            receivers.append(threading.Thread(target=lambda one=server: rates.append(_received(one)), daemon=True))
        time.sleep(_JOIN_SECONDS)
        senders = [threading.Thread(target=_send, args=(one, seconds), daemon=True) for one in clients]
        for thread in [*receivers, *senders]:
            thread.start()
        for thread in [*senders, *receivers]:
            thread.join(2 * _DEADLINE_S)
    if len(rates) < HOSTS:
        raise OSError("a connection of MPTCP ended early")
    return sum(rates) / HOSTS


def _send(connection: socket.socket, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(_BLOCK)
    connection.shutdown(socket.SHUT_WR)


def _received(connection: socket.socket) -> float:
    buffer = bytearray(1 << 20)
    began, count = 0.0, -len(_FIRST)
    while found := connection.recv_into(buffer):
        count += found
        if count > 0 and not began:
            began, count = time.monotonic(), 0
    return count / (time.monotonic() - began)
