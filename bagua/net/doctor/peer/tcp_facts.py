"""What the kernel knows of a TCP connection: round trip and path MTU (TCP_INFO, IP_MTU)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

# linux/in.h and linux/in6.h; Python has no names for them.
_IP_MTU = 14
_IPV6_MTU = 24
# struct tcp_info of linux/tcp.h: eight bytes, 24 integers of 32 bits, four of 64, then integers of 32 again.
_RETRANSMITS_AT = 100
_MIN_RTT_AT = 148
_INFO_BYTES = 152


@dataclass(frozen=True)
class TcpFacts:
    """
    Attributes:
        min_rtt_s: the smallest round trip so far; None where the kernel does not tell.
        path_mtu: in bytes, of what has been sent so far.
        retransmits: segments sent again.
    """

    min_rtt_s: float | None
    path_mtu: int | None
    retransmits: int


def tcp_facts(connection: socket.socket) -> TcpFacts:
    """Of a connected socket."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    min_rtt_us = struct.unpack_from("I", info, _MIN_RTT_AT)[0] if len(info) >= _INFO_BYTES else 0
    retransmits = struct.unpack_from("I", info, _RETRANSMITS_AT)[0] if len(info) > _RETRANSMITS_AT + 3 else 0
    level, option = (
        (socket.IPPROTO_IPV6, _IPV6_MTU) if connection.family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
    )
    try:
        path_mtu: int | None = connection.getsockopt(level, option)
    except OSError:
        path_mtu = None
    # The kernel's "not known" is the largest integer.
    known = 0 < min_rtt_us < 0xFFFFFFFF
    return TcpFacts(min_rtt_us / 1e6 if known else None, path_mtu, retransmits)
