"""What the kernel says of the network interfaces of this host: in the network namespace of this process, where /sys may
show those of the namespace that mounted it (netdevice(7)). Nothing is sent."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_SIOCGIFMTU = 0x8921
_NAME_BYTES = 15
_IFF_UP = 0x1
_IFF_RUNNING = 0x40
_INET6_SCOPE_LINK = 0x20


def interface_addresses() -> dict[str, list[str]]:
    """Every interface with its addresses: the first IPv4 one, then IPv6 (none with link scope, which needs a zone)."""
    addresses: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        answer = _asked(name, _SIOCGIFADDR)
        addresses[name] = [] if answer is None else [socket.inet_ntoa(answer[4:8])]
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if int(scope, 16) != _INET6_SCOPE_LINK and name in addresses:
            addresses[name].append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return addresses


def mtu_of(name: str) -> int:
    """In bytes; 0: unknown."""
    answer = _asked(name, _SIOCGIFMTU)
    return 0 if answer is None else int(struct.unpack_from("i", answer)[0])


def has_lost_carrier(name: str) -> bool:
    """Switched on, and without a link. One that the kernel does not know, or that is switched off, has lost nothing."""
    answer = _asked(name, _SIOCGIFFLAGS)
    flags = 0 if answer is None else int(struct.unpack_from("H", answer)[0])
    return bool(flags & _IFF_UP) and not flags & _IFF_RUNNING


def source_address(target: str) -> str:
    """Of packets to an address; "": there is no route, or it is a name, which would have to be looked up."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        socket.inet_pton(family, target.partition("%")[0])
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return ""


def _asked(name: str, request: int) -> bytes | None:
    """What follows the name in the answer; None: there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            return fcntl.ioctl(control.fileno(), request, struct.pack("16s240x", name.encode()[:_NAME_BYTES]))[16:]
        except OSError:
            return None
