"""What one end tells the other about its host. What arrives is data from the network: checked, and never trusted."""

from __future__ import annotations

import os
import platform
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bagua.net import native, secret_file
from bagua.net.bench.errors import BenchError
from bagua.net.bench.rendezvous import host_identity
from bagua.net.nccl_library import find_nccl_libraries, find_torch
from bagua.network_interfaces import interface_addresses, mtu_of
from bagua.version import __version__

_MAX_TEXT = 200
_MAX_LINE = 2000  # an error lists the interfaces
_MAX_ITEMS = 1024  # a host of containers has hundreds of interfaces
# linux/in.h and linux/in6.h; Python has no names for them.
_IP_MTU = 14
_IPV6_MTU = 24
# struct tcp_info of linux/tcp.h: eight bytes, 24 integers of 32 bits, four of 64, then integers of 32 again.
_RETRANSMITS_AT = 100
_MIN_RTT_AT = 148
_INFO_BYTES = 152


@dataclass(frozen=True)
class InterfaceFacts:
    """
    Attributes:
        mtu: in bytes; 0: unknown.
        speed_mbps: of the link; 0: unknown.
        used: by Bagua-Net.
        device: of NCCL's that it belongs to: "eth0+eth1" where interfaces are joined; "": it is not used.
        address: of `addresses`, the one that a job would use; "": unknown.
    """

    name: str
    addresses: tuple[str, ...]
    mtu: int = 0
    speed_mbps: int = 0
    used: bool = False
    loopback: bool = False
    device: str = ""
    address: str = ""


@dataclass(frozen=True)
class HostFacts:
    """
    Attributes:
        identity: the same for all network namespaces of one running kernel.
        own_addresses: what the host's own name resolves to there.
        nccl, torch: versions; "" for none.
        tcp_wmem_max, tcp_rmem_max: the most that TCP buffers for a connection, in bytes; 0: unknown.
        interfaces_error: why the plugin can use no interface there; "" if it can.
        secret: key id of BAGUA_NET_SECRET_FILE, "none", or "unreadable", also if encryption lacks
            one; "": unknown.
        encrypts: the plugin would encrypt there.
    """

    host: str
    version: str
    identity: str = ""
    own_addresses: tuple[str, ...] = ()
    kernel: str = ""
    congestion_control: str = ""
    cpus: int = 1
    nccl: str = ""
    torch: str = ""
    tcp_wmem_max: int = 0
    tcp_rmem_max: int = 0
    interfaces: tuple[InterfaceFacts, ...] = field(default=())
    interfaces_error: str = ""
    secret: str = ""
    encrypts: bool = False

    @property
    def uses_ipv6(self) -> bool | None:
        """A job's addresses are of IPv6, by its first interface; None: unknown."""
        return next((":" in one.address for one in self.interfaces if one.used and one.address), None)

    def interface_of(self, address: str) -> InterfaceFacts | None:
        return next((one for one in self.interfaces if address in one.addresses), None)

    def joined_with(self, interface: InterfaceFacts) -> tuple[InterfaceFacts, ...]:
        """It and the other interfaces of its device."""
        return tuple(
            one for one in self.interfaces if one == interface or (one.device and one.device == interface.device)
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_of_this_host(environment: Mapping[str, str]) -> HostFacts:
    """`environment`: what a job would be started with."""
    release = next((one.release for one in find_nccl_libraries(environment) if one.release is not None), None)
    torch = find_torch()
    interfaces, error = _interfaces(environment)
    host = socket.gethostname()
    return HostFacts(
        host=host,
        version=__version__,
        identity=host_identity(),
        own_addresses=tuple(resolved(host)),
        kernel=platform.release(),
        congestion_control=_words("/proc/sys/net/ipv4/tcp_congestion_control", 1)[0],
        cpus=len(os.sched_getaffinity(0)),
        nccl="" if release is None else str(release),
        torch="" if torch is None else torch.version,
        tcp_wmem_max=_integer(_words("/proc/sys/net/ipv4/tcp_wmem", 3)[2]),
        tcp_rmem_max=_integer(_words("/proc/sys/net/ipv4/tcp_rmem", 3)[2]),
        interfaces=interfaces,
        interfaces_error=error,
        secret=_secret(environment),
        encrypts=bool(secret_file.cipher(environment)),
    )


def _secret(environment: Mapping[str, str]) -> str:
    file = environment.get(secret_file.SECRET_FILE, "").strip()
    if not file and not secret_file.cipher(environment):
        return "none"
    try:
        return native.secret_key_id(file)
    except (ValueError, RuntimeError):
        return "unreadable"


def resolved(name: str) -> list[str]:
    """All addresses of a name, each once; empty if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interfaces(environment: Mapping[str, str]) -> tuple[tuple[InterfaceFacts, ...], str]:
    error = ""
    known: dict[str, native.Interface] = {}
    devices: dict[str, str] = {}
    try:
        known = {row.name: row for row in native.interfaces(environment)}
        devices = {name: "+".join(group) for group in native.nic_groups(environment).groups for name in group}
    except (ValueError, RuntimeError) as problem:
        error = str(problem)
    facts = []
    for name, addresses in interface_addresses().items():
        row = known.get(name)
        facts.append(
            InterfaceFacts(
                name,
                tuple(dict.fromkeys([*addresses, *([row.address] if row and row.address else [])])),
                mtu_of(name),
                max(0, row.speed_mbps) if row else 0,
                bool(row and row.used),
                bool(row and row.loopback) or name == "lo",
                devices.get(name, ""),
                row.address if row else "",
            )
        )
    return tuple(facts), error


def _words(path: str, count: int) -> list[str]:
    try:
        words = Path(path).read_text(encoding="ascii").split()
    except OSError:
        words = []
    return [*words, *[""] * count][:count]


def _integer(text: str) -> int:
    return int(text) if text.isdigit() else 0


def parse_facts(document: object) -> HostFacts:
    """Fields of other versions are left out, missing ones are empty.

    Raises:
        BenchError: it is no description of a host.
    """
    if not isinstance(document, dict) or not document.get("host") or not document.get("version"):
        raise BenchError("the peer did not describe its host; install the same version of bagua on both")
    interfaces = document.get("interfaces")
    rows = [row for row in interfaces if isinstance(row, dict)] if isinstance(interfaces, list) else []
    error = document.get("interfaces_error") or ""
    return HostFacts(
        **{name: _text(document.get(name)) for name in _TEXTS},
        cpus=max(1, _number(document.get("cpus"))),
        own_addresses=_texts(document.get("own_addresses")),
        interfaces_error="\n".join(_text(line, _MAX_LINE) for line in str(error).split("\n")[:2]),
        encrypts=document.get("encrypts") is True,
        tcp_wmem_max=_number(document.get("tcp_wmem_max")),
        tcp_rmem_max=_number(document.get("tcp_rmem_max")),
        interfaces=tuple(
            InterfaceFacts(
                _text(row.get("name")),
                _texts(row.get("addresses")),
                _number(row.get("mtu")),
                _number(row.get("speed_mbps")),
                row.get("used") is True,
                row.get("loopback") is True,
                _text(row.get("device")),
                _text(row.get("address")),
            )
            for row in rows[:_MAX_ITEMS]
        ),
    )


_TEXTS = ("host", "version", "identity", "kernel", "congestion_control", "nccl", "torch", "secret")


def _text(value: object, most: int = _MAX_TEXT) -> str:
    """What may be shown on a terminal."""
    text = value if isinstance(value, str) else ""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def _texts(value: object) -> tuple[str, ...]:
    items: Sequence[object] = value if isinstance(value, list) else ()
    return tuple(_text(item) for item in items[:_MAX_ITEMS])


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48 else 0


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
