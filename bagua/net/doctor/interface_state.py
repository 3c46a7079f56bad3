"""Whether a network interface is switched on, and whether its link is there, as the kernel says (netdevice(7))."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_IFF_RUNNING = 0x40


def has_lost_carrier(name: str) -> bool:
    """Switched on, and without a link. One that the kernel does not know, or that is switched off, has lost nothing."""
    request = struct.pack("16s240x", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            answer = fcntl.ioctl(control.fileno(), _SIOCGIFFLAGS, request)
        except OSError:
            return False
    flags = int(struct.unpack_from("H", answer, 16)[0])
    return bool(flags & _IFF_UP) and not flags & _IFF_RUNNING
