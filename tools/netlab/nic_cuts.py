"""Cutting one NIC of a host off from the network, and returning it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .lab import PREFIX_LENGTH, Lab

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
    own = [lab.hosts[host].address(nic, version) for version in lab.ip_versions]
    prefixed = [f"{address}/{PREFIX_LENGTH[version]}" for address, version in zip(own, lab.ip_versions, strict=True)]
    # A NIC that is set down forgets its IPv6 addresses.
    give_addresses = [_with_address("replace", address, name) for address in prefixed]
    if way == "link down":
        cut, undo = {host: [f"link set {name} down"]}, {host: [f"link set {name} up", *give_addresses]}
    elif way == "address removed":
        cut, undo = {host: [_with_address("del", address, name) for address in prefixed]}, {host: give_addresses}
    elif way == "silent":
        others = [one for one in lab.hosts if one.index != host]
        unreachable = {one.index: own for one in others}
        unreachable[host] = [one.address(nic, version) for one in others for version in lab.ip_versions]
        cut = {
            index: [f"neigh replace {address} lladdr {_NOBODY} dev {name} nud permanent" for address in addresses]
            for index, addresses in unreachable.items()
        }
        undo = {
            index: [f"neigh del {address} dev {name}" for address in addresses]
            for index, addresses in unreachable.items()
        }
    else:
        raise ValueError(f"way is {way!r}; it must be one of {', '.join(map(repr, NIC_CUTS))}")
    for index, lines in cut.items():
        _run_ip(lab, index, lines)
    try:
        yield
    finally:
        for index, lines in undo.items():
            _run_ip(lab, index, lines)


def _with_address(verb: str, address: str, name: str) -> str:
    # Without waiting whether another host has it.
    return f"addr {verb} {address} dev {name}" + (" nodad" if ":" in address and verb != "del" else "")


def _run_ip(lab: Lab, host: int, lines: Sequence[str]) -> None:
    lab.run(host, ["ip", "-batch", "-"], stdin_text="\n".join(lines), check=True)
