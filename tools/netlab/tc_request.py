"""Traffic-control requests packed here, for the two kinds whose options pyroute2 cannot encode: bfifo and a classifier
with a classic BPF program. They go to the network namespace in which the calling thread is."""

from __future__ import annotations

import os
import socket
import struct

_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_NLMSG_ERROR = 2
_TCA_KIND = 1
_TCA_OPTIONS = 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_TCMSG = struct.Struct("=BxxxiIII")  # tcmsg: family, interface, handle, parent, info
_ANSWER_SECONDS = 5.0


def attribute(number: int, payload: bytes) -> bytes:
    """One netlink attribute: length, number, payload, padding to four bytes."""
    length = 4 + len(payload)
    return struct.pack("=HH", length, number) + payload + b"\0" * (-length % 4)


def send_tc_request(
    message_type: int, *, index: int, handle: int, parent: int, kind: str, options: bytes, info: int = 0
) -> None:
    """Creates a qdisc or filter and waits for the kernel's answer; OSError with the errno that it gave."""
    body = _TCMSG.pack(socket.AF_UNSPEC, index, handle, parent, info)
    body += attribute(_TCA_KIND, kind.encode() + b"\0") + attribute(_TCA_OPTIONS, options)
    flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_EXCL | _NLM_F_CREATE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as route:
        route.settimeout(_ANSWER_SECONDS)
        route.send(_HEADER.pack(_HEADER.size + len(body), message_type, flags, 1, 0) + body)
        answer = route.recv(65536)
    _, answer_type, _, _, _ = _HEADER.unpack_from(answer)
    (number,) = struct.unpack_from("=i", answer, _HEADER.size)
    if answer_type != _NLMSG_ERROR:
        raise RuntimeError(f"rtnetlink answered a {kind} request with message type {answer_type}, not with an ACK")
    if number != 0:
        raise OSError(-number, os.strerror(-number))
