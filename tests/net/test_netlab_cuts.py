"""One NIC of several is cut off in each way, and returned."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
