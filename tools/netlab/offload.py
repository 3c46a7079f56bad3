"""Segmentation offload of a veth interface. On (the default) the kernel passes packets of up to 64 KiB and the MTU
costs almost nothing, as with a real NIC's hardware offload; off, every packet of MTU size is handled by itself."""

from __future__ import annotations

import array
import fcntl
import socket
import struct

from .errors import translated

_SIOCETHTOOL = 0x8946
# ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO (linux/ethtool.h).
_SWITCHES = (0x1F, 0x24, 0x2C)


def disable_segmentation_offload(interface: str) -> None:
    """For an interface in the calling thread's network namespace."""
    with (
        translated(f"switching segmentation offload of {interface} off"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket,
    ):
        for switch in _SWITCHES:
            value = array.array("B", struct.pack("=II", switch, 0))
            request = struct.pack("@16sP16x", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
