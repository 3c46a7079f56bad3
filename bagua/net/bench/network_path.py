"""Which of this host's addresses the drivers use, so that every backend takes the same path."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua.net import native
from bagua.net.bench.errors import UsageError
from bagua.net.bench.launch_environment import LOOPBACK

_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 15
_INET6_SCOPE_LINK = 0x20


@dataclass(frozen=True)
class NetworkPath:
    address: str
    interface: (
        str  # "eth0", or "eth0,eth1" where BAGUA_NET_JOIN_NICS joins them; "" leaves NCCL_SOCKET_IFNAME to the user
    )


def interface_addresses() -> dict[str, list[str]]:
    """Every interface with its addresses: the first IPv4 one, then IPv6 (none with link scope, which needs a zone)."""
    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            addresses[name] = []
            request = struct.pack("16s240x", name.encode()[:_INTERFACE_NAME_BYTES])
            try:
                answer = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # It has no IPv4 address.
            addresses[name].append(socket.inet_ntoa(answer[20:24]))
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if int(scope, 16) != _INET6_SCOPE_LINK and name in addresses:
            addresses[name].append(str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return addresses


def _known(addresses: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{name} ({' '.join(found) or 'no address'})" for name, found in addresses.items())


def choose_path(
    *,
    address: str | None,
    interface: str | None,
    default_address: str,
    environment: Mapping[str, str],
    addresses: Mapping[str, list[str]] | None = None,
) -> NetworkPath:
    """--interface or --address as given; else the default's. A user's NCCL_SOCKET_IFNAME is never replaced, unless
    an option asks for it. `addresses` are this host's (default: asked from the kernel)."""
    if addresses is None:
        addresses = interface_addresses()
    if interface is not None:
        if interface not in addresses:
            raise UsageError(f"--interface {interface!r} does not exist on this host; it has {_known(addresses)}")
        if address is None and not addresses[interface]:
            raise UsageError(f"--interface {interface!r} has no address on this host; it has {_known(addresses)}")
        if address is not None and address not in addresses[interface]:
            raise UsageError(f"--address {address!r} is not on --interface {interface!r}; it has {_known(addresses)}")
        return NetworkPath(address or addresses[interface][0], interface)
    if address is not None:
        name = _interface_of(address, addresses)
        if name is None:
            raise UsageError(
                f"--address {address!r} is no address of this host, which has {_known(addresses)}; across hosts give"
                " --interface, which is the same on all"
            )
        return NetworkPath(address, name)
    if environment.get("NCCL_SOCKET_IFNAME"):
        return NetworkPath(default_address, "")
    name = _interface_of(default_address, addresses) or ""
    return NetworkPath(default_address, ",".join(_joined_with(name, environment)))


def _joined_with(name: str, environment: Mapping[str, str]) -> list[str]:
    """The interface, and those that BAGUA_NET_JOIN_NICS joins with it."""
    if "BAGUA_NET_JOIN_NICS" not in environment:
        return [name]
    try:
        groups = native.nic_groups(environment).groups
    except (ValueError, RuntimeError):  # the plugin will say why
        groups = []
    return next((group for group in groups if name in group), [name])


def _interface_of(address: str, addresses: Mapping[str, list[str]]) -> str | None:
    for name, found in addresses.items():
        if address in found:
            return name
    # All of 127/8 is on the loopback interface, which lists one address of it.
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise UsageError(f"--address {address!r} is no IP address; it is like {LOOPBACK} or fd00::1") from error
    return "lo" if loopback and "lo" in addresses else None
