"""One NIC of several is cut off in each way, returned, or given a delay or losses of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.lab_traffic import until
from support.labs import NEEDS_LAB, NIC_CUTS, Lab, cut_nic

pytestmark = NEEDS_LAB

_SECONDS = 10.0


@contextmanager
def _receiver(lab: Lab, host: int, version: int) -> Iterator[socket.socket]:
    with lab.inside(host), socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(_SECONDS)
        one.bind(("::" if version == 6 else "0.0.0.0", 0))
        yield one


def _send(lab: Lab, host: int, nic: int, version: int, port: int, text: bytes) -> None:
    """To the other host's NIC of that number."""
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    with lab.inside(host), socket.socket(family, socket.SOCK_DGRAM) as one:
        one.sendto(text, (lab.hosts[1 - host].address(nic, version), port))


def test_a_nic_that_is_cut_carries_nothing_until_it_returns() -> None:
    cases = [(way, version) for way in NIC_CUTS for version in (4, 6)]
    with Lab(nics=2) as lab:
        for number, (way, version) in enumerate(cases):
            sender = number % 2
            with _receiver(lab, 1 - sender, version) as receiver:
                port = receiver.getsockname()[1]
                with cut_nic(lab, 0, 1, way):
                    try:
                        _send(lab, sender, 1, version, port, b"cut")
                    except OSError:
                        assert way != "silent"
                    _send(lab, sender, 0, version, port, b"eth0")
                    assert receiver.recv(100) == b"eth0"
                deadline = time.monotonic() + _SECONDS
                receiver.settimeout(0.1)
                received = b""
                while received != b"returned":
                    assert time.monotonic() < deadline
                    try:
                        _send(lab, sender, 1, version, port, b"returned")
                        received = receiver.recv(100)
                    except (TimeoutError, OSError):
                        continue  # until the neighbour is known again


def test_a_way_that_does_not_exist_is_an_error() -> None:
    with (
        Lab() as lab,
        pytest.raises(ValueError, match="way is 'axe'; it must be one of 'link down', "),
        cut_nic(lab, 0, 0, "axe"),
    ):
        pass


def _round_trip_ms(lab: Lab, nic: int) -> float:
    """The shortest of several, of a datagram and its answer."""
    with _receiver(lab, 1, 4) as far, _receiver(lab, 0, 4) as near:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            near.sendto(b"ping", (lab.hosts[1].address(nic), far.getsockname()[1]))
            _, sender = far.recvfrom(100)
            far.sendto(b"pong", sender)
            near.recv(100)
            times.append((time.perf_counter() - began) * 1e3)
    return min(times)


def test_one_nic_of_two_has_a_delay() -> None:
    with Lab(nics=2, delay_ms=(0, 20), ip_versions=(4,)) as lab:
        assert until(lambda ms: ms < 20, lambda: _round_trip_ms(lab, 0)) < 20
        assert _round_trip_ms(lab, 1) > 19.9
        assert len(lab.delay_usage()) == 2


def _arrived(lab: Lab, nic: int, count: int) -> int:
    """Of so many datagrams. Real time: that one was lost has no event. Others are in the socket before we read, and on
    a slow machine, too."""
    with _receiver(lab, 1, 4) as receiver:
        for _ in range(count):
            _send(lab, 0, nic, 4, receiver.getsockname()[1], b"one")
        receiver.settimeout(1)
        for arrived in range(count):
            try:
                receiver.recv(100)
            except TimeoutError:
                return arrived
    return count


def test_one_nic_of_two_loses_packets() -> None:
    with Lab(nics=2, loss=(0, 0.2), ip_versions=(4,)) as lab:
        for nic in range(2):
            assert until(bool, lambda nic=nic: _arrived(lab, nic, 1)), "the neighbour is known"
        assert _arrived(lab, 0, 80) == 80
        assert 0 < _arrived(lab, 1, 80) < 80
