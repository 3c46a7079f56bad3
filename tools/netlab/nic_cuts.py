"""Cutting one NIC of a host off from the network, and returning it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from .lab import PREFIX_LENGTH, Lab
from .netlink import Netlink

# As an administrator does it; as a lease ends; as a switch fails whose ports stay up.
NIC_CUTS = ("link down", "address removed", "silent")

# No interface has it: whoever receives such a packet drops it.
_NOBODY = "02:00:00:00:00:01"


@contextmanager
def cut_nic(lab: Lab, host: int, nic: int, way: str) -> Iterator[None]:
    """For the duration, nothing reaches the host's NIC and nothing leaves it.

    Args:
        way: one of NIC_CUTS. With `silent`, neither end is told.
    """
    name = f"eth{nic}"
    own = {lab.hosts[host].address(nic, version): PREFIX_LENGTH[version] for version in lab.ip_versions}
    if way == "silent":
        others = [one for one in lab.hosts if one.index != host]
        unreachable = {one.index: list(own) for one in others}
        unreachable[host] = [one.address(nic, version) for one in others for version in lab.ip_versions]
        _set_neighbours(lab, name, unreachable, _NOBODY)
    else:
        with lab.inside(host), Netlink() as netlink:
            if way == "link down":
                netlink.change(name, state="down")
            elif way == "address removed":
                for address, length in own.items():
                    netlink.remove_address(name, address, length)
            else:
                raise ValueError(f"way is {way!r}; it must be one of {', '.join(map(repr, NIC_CUTS))}")
    try:
        yield
    finally:
        if way == "silent":
            _set_neighbours(lab, name, unreachable, None)
        else:
            with lab.inside(host), Netlink() as netlink:
                netlink.change(name, state="up")
                # A NIC that is set down forgets its IPv6 addresses.
                for address, length in own.items():
                    netlink.add_address(name, address, length)


def _set_neighbours(lab: Lab, name: str, addresses: Mapping[int, Sequence[str]], hardware_address: str | None) -> None:
    for host, unreachable in addresses.items():
        with lab.inside(host), Netlink() as netlink:
            for address in unreachable:
                netlink.set_neighbour(name, address, hardware_address)
