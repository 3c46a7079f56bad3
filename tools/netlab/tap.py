"""TAP devices: network interfaces whose packets a program carries. They are an end of a wire that has a delay.

A device lives as long as a descriptor of it is open, so that none outlives its lab and its forwarder.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from .errors import NetlabError, translated

_TUN = Path("/dev/net/tun")
_TUN_NUMBERS = (10, 200)  # Linux's device list

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETCARRIER = 0x400454CA, 0x400454D0, 0x400454E2
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TSO_IPV4, _TSO_IPV6, _TSO_ECN = 1, 2, 4, 8

_SIOCETHTOOL = 0x8946
_ETHTOOL_SSET = 0x02
# What a veth reports. The 10 Mbit/s that a TAP device of older kernels reports would make NCCL plan for a modem.
_SPEED_MBIT = 10_000
_FULL_DUPLEX = 1

# Linux's 65535 less the Ethernet header.
MAX_MTU = 65521


def missing_tap_device() -> str | None:
    """Why no TAP device can be made here, with the remedy; None if one can."""
    try:
        os.close(os.open(_TUN, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        major, minor = _TUN_NUMBERS
        return (
            f"delays need {_TUN}, which does not exist here: load the module (modprobe tun), make the file (mkdir -p"
            f" {_TUN.parent} && mknod {_TUN} c {major} {minor}), or start the container with --device {_TUN}"
        )
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.ENXIO):
            return "delays need TAP devices, which this kernel lacks: modprobe tun, or use a kernel with CONFIG_TUN"
        return (
            f"delays need {_TUN}, which cannot be opened ({error.strerror}): run as root, and in a container started"
            f" with --device {_TUN}"
        )
    return None


def open_tap(name: str) -> int:
    """Makes the interface `name` in the calling thread's network namespace. Returns its descriptor: what is read from
    it the interface sent, what is written to it the interface receives, each with a virtio header. Not blocking."""
    lacking = missing_tap_device()
    if lacking is not None:
        raise NetlabError(f"netlab: {lacking}")
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with translated(f"making TAP device {name}", "CONFIG_TUN"):
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            # Packets pass as TCP made them, of up to 64 KiB, as through a veth.
            fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _CHECKSUM | _TSO_IPV4 | _TSO_IPV6 | _TSO_ECN)
            _report_speed(name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def plug_in(descriptor: int) -> None:
    """The cable, out and in again. Only a change makes the kernel tell programs that the interface runs."""
    with translated("connecting a TAP device", "CONFIG_TUN"):
        for state in (0, 1):
            fcntl.ioctl(descriptor, _TUNSETCARRIER, struct.pack("=I", state))


def _report_speed(name: str) -> None:
    # struct ethtool_cmd: command, supported, advertising, speed, duplex, ...
    value = array.array("B", struct.pack("=IIIHB29x", _ETHTOOL_SSET, 0, 0, _SPEED_MBIT, _FULL_DUPLEX))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("@16sP16x", name.encode(), value.buffer_info()[0]))
