"""What each network interface of a host in a netlab network carries, and traffic until that is as it should be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from support.lab_ring import Ring

if TYPE_CHECKING:
    from netlab import Lab  # a package of tools/, which the tests of netlab put on the path


def run_ip(lab: Lab, host: int, *words: str) -> None:
    """ip(8) on a host."""
    lab.run(host, ["ip", *words], check=True)


def sent_bytes(lab: Lab, host: int) -> list[int]:
    """By interface of the host, since the start of the lab."""
    paths = [f"/sys/class/net/{name}/statistics/tx_bytes" for name in lab.hosts[host].interfaces]
    return [int(line) for line in lab.run(host, ["cat", *paths], check=True).stdout.split()]


def bytes_carried(lab: Lab, host: int, work: Callable[[], Any]) -> list[int]:
    """What each interface of the host sent meanwhile."""
    before = sent_bytes(lab, host)
    work()
    return [after - start for after, start in zip(sent_bytes(lab, host), before, strict=True)]


def traffic_until(ring: Ring, is_due: Callable[[], bool], seconds: float = 30.0) -> None:
    """All-reduces, each byte of which is checked, until then."""
    deadline = time.monotonic() + seconds
    ring.verify(2 << 20)
    while not is_due():
        assert time.monotonic() < deadline, "\n".join(driver.log() for driver in ring.drivers)
        ring.verify(2 << 20)


def traffic_until_shared(
    lab: Lab, ring: Ring, host: int, is_shared: Callable[[Sequence[int]], bool], size: int = 16 << 20
) -> None:
    """All-reduces of `size` bytes until what the interfaces of the host carried of one of them is as wanted.

    A busy machine may share a single one otherwise: the shares follow the rates that were seen.
    """
    tries = [bytes_carried(lab, host, lambda: ring.verify(size))]
    deadline = time.monotonic() + 30
    while not is_shared(tries[-1]):
        assert time.monotonic() < deadline, (host, tries)
        tries.append(bytes_carried(lab, host, lambda: ring.verify(size)))
