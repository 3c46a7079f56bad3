"""Traffic between hosts of a lab: connections, and what they carry.

The rate of a link is of real time. What a busy machine does to it is measured again, for PATIENCE_S at most.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from support.processes import ahead_of_others

if TYPE_CHECKING:
    from netlab import Lab  # a package of tools/, which the tests of netlab put on the path

Found = TypeVar("Found")

# Far beyond what anything takes, on a busy machine as well: only a hang reaches it, or a rate that is wrong.
PATIENCE_S = 60.0


@contextmanager
def connections(
    lab: Lab, source: int, target: int, ports: Sequence[int], ip_version: int = 4, nic: int = 0
) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """(sending, receiving) ends of one connection for each source port (0: any)."""
    family = socket.AF_INET if ip_version == 4 else socket.AF_INET6
    with ExitStack() as stack:
        with lab.inside(target):
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind((lab.hosts[target].address(nic, ip_version), 0))
        listener.listen(len(ports))
        listener.settimeout(PATIENCE_S)
        senders, receivers = [], []
        for port in ports:
            with lab.inside(source):
                sender = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sender.settimeout(PATIENCE_S)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sender.bind((lab.hosts[source].address(nic, ip_version), port))
            sender.connect(listener.getsockname()[:2])
            receivers.append(stack.enter_context(listener.accept()[0]))
            senders.append(sender)
        yield senders, receivers


def _send_until(stop: threading.Event, sender: socket.socket) -> None:
    block = bytes(65536)
    sender.settimeout(0.2)
    while not stop.is_set():
        try:
            sender.send(block)
        except TimeoutError:
            continue
        except OSError:
            return


def _arrived_bytes(receiver: socket.socket) -> int:
    """Payload that the kernel has received, read or not: a reader that waits for the CPU does not change it."""
    information = receiver.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    (count,) = struct.unpack_from("=Q", information, 128)  # tcpi_bytes_received
    return int(count)


def mbit_per_flow(senders: list[socket.socket], receivers: list[socket.socket], seconds: float = 0.7) -> list[float]:
    """Payload rate of each connection, all sending at once. The first 0.3 s do not count: the token buckets start
    full, and TCP starts slowly.

    Real time, as a rate is one. A slow machine makes it lower once the CPUs limit it and not the link: tests of a limit
    choose one that a small share of a CPU reaches.
    """
    stop = threading.Event()
    threads = [threading.Thread(target=_send_until, args=(stop, sender)) for sender in senders]
    with selectors.DefaultSelector() as selector:
        for receiver in receivers:
            receiver.setblocking(False)
            selector.register(receiver, selectors.EVENT_READ)

        def read(until: float) -> None:
            while time.monotonic() < until:
                for key, _ in selector.select(timeout=0.1):
                    receiver = key.fileobj
                    assert isinstance(receiver, socket.socket)
                    receiver.recv(1 << 20)

        for thread in threads:
            thread.start()
        read(time.monotonic() + 0.3)
        begin, before = time.monotonic(), [_arrived_bytes(receiver) for receiver in receivers]
        read(begin + seconds)
        after = [_arrived_bytes(receiver) for receiver in receivers]
        # From before the first reading to after the last one: a pause in between lowers the rate and never raises it.
        elapsed = time.monotonic() - begin
    stop.set()
    for receiver in receivers:
        receiver.close()  # resets the connection: a sender that waits for room wakes
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [(last - first) * 8e-6 / elapsed for first, last in zip(before, after, strict=True)]


def measure(
    lab: Lab, source: int, target: int, ports: Sequence[int] = (0,), ip_version: int = 4, nic: int = 0
) -> list[float]:
    with connections(lab, source, target, ports, ip_version, nic) as (senders, receivers):
        return mbit_per_flow(senders, receivers)


def until(good: Callable[[Found], bool], attempt: Callable[[], Found]) -> Found:
    """What `attempt` gives, again where other processes had the machine and it is not `good`."""
    deadline = time.monotonic() + PATIENCE_S
    while not good(found := attempt()) and time.monotonic() < deadline:
        pass
    return found


def holds(measured: float, limit_mbit: float) -> bool:
    """Above the limit by the bucket's burst at most; below it by headers (6 % at MTU 1500) and a busy machine.

    A busy machine also delivers late what the link had passed before the measured time: ask again before you judge.
    """
    return 0.6 * limit_mbit < measured < 1.08 * limit_mbit


def assert_sum_holds(limit_mbit: float, lab: Lab, source: int, target: int, *how: Any, **named: Any) -> None:
    """`holds` for all flows of `measure` together, ahead of others: the rate is of real time, and behind busy processes
    the senders, whose threads inherit this, would send less than the link passes."""

    def attempt() -> list[float]:
        with ahead_of_others():
            return measure(lab, source, target, *how, **named)

    flows = until(lambda flows: holds(sum(flows), limit_mbit), attempt)
    assert holds(sum(flows), limit_mbit), (flows, limit_mbit)
