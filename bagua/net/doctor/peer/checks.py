"""The sections of the report: findings about names, route, MTU, versions, ports and bandwidth."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bagua.net.doctor.finding import Finding, Section, Status, fail, ok, skip, split_message, warn
from bagua.net.doctor.peer.bandwidth import RECEIVED, SENT, Bandwidth, Rate
from bagua.net.doctor.peer.facts import HostFacts, TcpFacts
from bagua.net.doctor.peer.reach import Reach, best_of, gbit

_ETHERNET_MTU = 1500
_ASYMMETRY = 1.25
_GIB = 1 << 30


_SAME_HOST = "not examined: the peer is this host, and data to it takes no NIC"


def is_same_host(local: str, remote: str, here: HostFacts, there: HostFacts) -> bool:
    """Of one network: two namespaces of a kernel have addresses of their own."""
    if not here.identity or here.identity != there.identity:
        return False
    return local == remote or _is_loopback(remote) or here.interface_of(remote) is not None


def check_names(
    name: str, addresses: Sequence[str], used: str, here: HostFacts, there: HostFacts, *, same_host: bool = False
) -> Section:
    if same_host:
        findings = [
            ok(f"{name} is this host: this shows that both ends run here, and how fast this host talks to itself"),
            skip("the network to other hosts: give --peer the name of another host"),
        ]
        return Section("names", "Names", tuple(findings), {"name": name, "peer_host": there.host, "same_host": True})
    findings = []
    if list(addresses) == [name]:
        findings.append(ok(f"{there.host} answers at {used}"))
    else:
        findings.append(ok(f"{name} is {', '.join(addresses)}; {there.host} answers at {used}"))
    for facts, where in ((here, "here"), (there, "there")):
        own = facts.own_addresses
        if not own:
            findings.append(
                warn(
                    f"the host name {facts.host} cannot be resolved {where}",
                    f"add it to /etc/hosts {where}, or set MASTER_ADDR and GLOO_SOCKET_IFNAME: gloo looks it up",
                )
            )
        elif all(_is_loopback(address) for address in own) and not _is_loopback(used):
            findings.append(
                warn(
                    f"the host name {facts.host} is {', '.join(own)} {where}, which other hosts cannot reach",
                    f"correct /etc/hosts {where}, or set MASTER_ADDR and GLOO_SOCKET_IFNAME to what other hosts reach",
                )
            )
    facts_json = {"name": name, "addresses": list(addresses), "peer_address": used, "peer_host": there.host}
    return Section("names", "Names", tuple(findings), facts_json)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_versions(here: HostFacts, there: HostFacts) -> Section:
    findings = []
    if here.version == there.version:
        findings.append(ok(f"bagua {here.version} on both"))
    else:
        findings.append(
            warn(f"bagua is {here.version} here and {there.version} there", "install the same version on all hosts")
        )
    for name, mine, theirs in (("NCCL", here.nccl, there.nccl), ("torch", here.torch, there.torch)):
        if mine != theirs:
            findings.append(
                warn(
                    f"{name} is {mine or 'not installed'} here and {theirs or 'not installed'} there",
                    f"install the same version of {name}: a job of both hosts may fail to start or to communicate",
                )
            )
    rows = [
        ("", "here", "there"),
        *((name, getattr(here, key) or "-", getattr(there, key) or "-") for name, key in _COMPARED),
        ("CPUs", str(here.cpus), str(there.cpus)),
    ]
    return Section(
        "versions", "Versions", tuple(findings), {"here": here.as_json(), "there": there.as_json()}, (*rows,)
    )


_COMPARED = (
    ("host", "host"),
    ("bagua", "version"),
    ("NCCL", "nccl"),
    ("torch", "torch"),
    ("kernel", "kernel"),
    ("TCP", "congestion_control"),
)


def check_route(local: str, remote: str, here: HostFacts, there: HostFacts, *, same_host: bool = False) -> Section:
    """Does the plugin use the interfaces by which the hosts reach each other?"""
    addresses = {"local_address": local, "remote_address": remote}
    if same_host and not here.interfaces_error:
        return Section("route", "Route", (skip(_SAME_HOST),), addresses)
    findings = []
    for facts, address, where in ((here, local, "here"), (there, remote, "there")):
        interface = facts.interface_of(address)
        if facts.interfaces_error:
            findings.append(split_message(Status.FAIL, f"{where}: {facts.interfaces_error}"))
        elif interface is None:
            findings.append(warn(f"{address} {where} is on no interface: an address is translated on the way"))
        elif not interface.used:
            used = ", ".join(one.name for one in facts.interfaces if one.used) or "none"
            findings.append(
                warn(
                    f"{where}, the route to the peer takes {interface.name}, and a job would use {used}",
                    f"set NCCL_SOCKET_IFNAME={interface.name} {where} if the other interface does not reach the peer",
                )
            )
        else:
            findings.append(ok(f"{where}: {address} on {interface.name}, which a job would use"))
    if None not in (here.uses_ipv6, there.uses_ipv6) and here.uses_ipv6 != there.uses_ipv6:
        mine, theirs = ("IPv6" if one.uses_ipv6 else "IPv4" for one in (here, there))
        findings.append(
            warn(
                f"a job would use addresses of {mine} here and of {theirs} there: joined interfaces are not used"
                " together",
                "set NCCL_SOCKET_FAMILY to the same value on all hosts",
            )
        )
    return Section("route", "Route", tuple(findings), addresses)


def check_secrets(here: HostFacts, there: HostFacts) -> Section:
    """Would ranks of both hosts accept each other? By the settings of both ends, which need not be those of a job."""
    ends = {"here": here, "there": there}
    facts = {where: {"key_id": one.secret, "encrypts": one.encrypts} for where, one in ends.items()}
    unreadable = [where for where, one in ends.items() if one.secret == "unreadable"]
    if "" in (here.secret, there.secret):
        finding = skip("the peer does not tell whether it has a secret")
    elif unreadable:
        finding = fail(
            f"BAGUA_NET_SECRET_FILE cannot be used {' and '.join(unreadable)}",
            "`bagua-net doctor` without --peer says why, on that host",
        )
    elif (here.secret, here.encrypts) != (there.secret, there.encrypts):
        said = [
            f"{'no secret' if one.secret == 'none' else f'the secret {one.secret}'},"
            f" {'encrypts' if one.encrypts else 'does not encrypt'}"
            for one in ends.values()
        ]
        finding = warn(
            f"{said[0]} here; {said[1]} there: ranks with these settings refuse each other",
            "give all ranks the same BAGUA_NET_SECRET_FILE and BAGUA_NET_ENCRYPTION, and both ends of this command, too"
            " (--ssh passes no variables on)",
        )
    elif here.secret == "none":
        finding = ok("no secret on either: only ranks that NCCL has introduced can join; traffic is not encrypted")
    else:
        finding = ok(f"the secret {here.secret} on both; {'both encrypt' if here.encrypts else 'neither encrypts'}")
    return Section("secrets", "Secrets", (finding,), facts)


def check_mtu(
    local: str,
    remote: str,
    here: HostFacts,
    there: HostFacts,
    tcp: TcpFacts,
    large_passes: bool,
    *,
    same_host: bool = False,
) -> Section:
    mine, theirs = here.interface_of(local), there.interface_of(remote)
    known = [one.mtu for one in (mine, theirs) if one is not None and one.mtu]
    facts = {"path_mtu": tcp.path_mtu, "interfaces": known, "large_messages_pass": large_passes}
    shown = f"{mine.mtu if mine else '?'} here, {theirs.mtu if theirs else '?'} there"
    if not large_passes:
        finding = fail(
            f"small messages pass, large ones do not (interfaces: {shown}): something on the way drops packets near"
            " the MTU and does not say so",
            "lower the MTU of both interfaces to that of the path, or let ICMP pass (net.ipv4.tcp_mtu_probing=1 helps)",
        )
        return Section("mtu", "MTU", (finding,), facts)
    if same_host:
        return Section("mtu", "MTU", (skip(_SAME_HOST),), facts)
    findings = []
    # TCP's packets are no larger than what the other end receives, whatever this end could send.
    path = None if tcp.path_mtu is None else min([tcp.path_mtu, *known])
    if path is None:
        findings.append(skip("the kernel does not tell the MTU of the path"))
    elif known and path < min(known):
        findings.append(
            warn(
                f"packets of the path hold {path} bytes, less than the interfaces do ({shown})",
                "a tunnel or a hop on the way has a smaller MTU; raise it there, or lower the interfaces'",
            )
        )
    elif path < _ETHERNET_MTU:
        findings.append(
            warn(
                f"packets hold {path} bytes, fewer than Ethernet's {_ETHERNET_MTU}: more packets for the same bytes",
                "raise the MTU of both interfaces if the network allows it",
            )
        )
    else:
        findings.append(ok(f"packets hold {path} bytes (interfaces: {shown})"))
    if len(known) == 2 and known[0] != known[1]:
        findings.append(
            warn(f"the interfaces differ: {shown}", "set the same MTU on all hosts; a switch drops what is too large")
        )
    return Section("mtu", "MTU", tuple(findings), facts)


def check_ports(addresses: Mapping[str, str], bandwidth: Bandwidth, local: str, remote: str) -> Section:
    """
    Args:
        addresses: those of the peer that a job would use; "" for one that answers, or why not.
    """
    findings = []
    silent = {address: why for address, why in addresses.items() if why}
    if silent:
        shown = "; ".join(f"{address}: {why}" for address, why in silent.items())
        findings.append(
            warn(
                f"addresses of the peer that a job would use and that do not answer: {shown}",
                "route them, or set NCCL_SOCKET_IFNAME on all hosts to the interfaces that reach each other",
            )
        )
    ways = {SENT: (remote, local), RECEIVED: (local, remote)}
    for direction, (listener, connector) in ways.items():
        if direction in bandwidth.failed:
            findings.append(_failed(listener, connector, bandwidth.failed[direction]))
        else:
            findings.append(ok(f"{connector} connects to ports that the kernel chooses on {listener}"))
    return Section("ports", "Ports", tuple(findings), {"addresses": dict(addresses), "failed": dict(bandwidth.failed)})


def _failed(listener: str, connector: str, why: str) -> Finding:
    for causes, remedy in _OWN_CAUSES.items():
        if any(cause in why for cause in causes):
            return fail(f"the transfers from {connector} to {listener} cannot start: {why}", remedy)
    return fail(
        f"nothing could be sent between {connector} and a port that the kernel chooses on {listener}: {why}",
        "open all TCP ports between the hosts: NCCL and the plugin listen on ports of net.ipv4.ip_local_port_range",
    )


# What a host runs out of by itself: no firewall is to blame.
_OWN_CAUSES = {
    ("Address already in use", "Cannot assign requested address"): (
        "widen net.ipv4.ip_local_port_range on both hosts (32768 60999 is usual): the kernel has no free port there,"
        " and NCCL and the plugin need one for each connection"
    ),
    ("Too many open files",): "raise the limit of open files (ulimit -n) on the host that the message names",
}


def check_bandwidth(
    bandwidth: Bandwidth, tcp: TcpFacts, round_trip_s: float, reach: Reach | None, *, same_host: bool = False
) -> Section:
    facts: dict[str, object] = {
        "round_trip_us": round_trip_s * 1e6,
        "min_round_trip_us": None if tcp.min_rtt_s is None else tcp.min_rtt_s * 1e6,
        "rates": [asdict(rate) for rate in bandwidth.rates],
        "all_reduce": None if reach is None else asdict(reach),
    }
    if not bandwidth.rates:
        return Section("bandwidth", "Bandwidth", (skip("not measured: no connection for it, see Ports"),), facts)
    fastest = round_trip_s if tcp.min_rtt_s is None else tcp.min_rtt_s
    findings = [ok(f"round trip {fastest * 1e3:.3g} ms")]
    for direction in (SENT, RECEIVED):
        rates = bandwidth.of(direction)
        if rates:
            findings.append(_scaling(direction, rates))
    ways = [best_of(rates).median for direction in (SENT, RECEIVED) if (rates := bandwidth.of(direction))]
    if len(ways) == 2 and not same_host and max(ways) > _ASYMMETRY * min(ways):
        findings.append(
            warn(
                f"one direction is slower: {gbit(ways[0])} sent, {gbit(ways[1])} received",
                "a ring is as slow as the slower; look for other traffic, and for an errored link (ethtool -S)",
            )
        )
    return Section("bandwidth", "Bandwidth", tuple(findings), facts, _table(bandwidth.rates))


def _scaling(direction: str, rates: Mapping[int, Rate]) -> Finding:
    best = best_of(rates)
    one = rates[1].median
    text = f"{direction}: {gbit(best.median)} over {best.streams} connection{'' if best.streams == 1 else 's'}"
    if rates[4].median >= 2 * one:
        return ok(f"{text}; each connection is limited to about {gbit(one)}, and Bagua-Net opens several")
    return ok(f"{text}; one alone carries {gbit(one)}")


def _table(rates: Sequence[Rate]) -> tuple[tuple[str, ...], ...]:
    rows = [("direction", "connections", "rate", "CPUs", "min..max")]
    rows += [
        (
            rate.direction,
            str(rate.streams),
            gbit(rate.median),
            f"{rate.cpus:.2g}",
            f"{gbit(rate.low)}..{gbit(rate.high)}",
        )
        for rate in rates
    ]
    return tuple(rows)


def check_reach(
    reach: Reach | None, round_trip_s: float, *, same_host: bool = False, is_encrypted: bool = False
) -> Section:
    if same_host:
        return Section("all_reduce", "All-reduce", (skip(_SAME_HOST),), {})
    if reach is None:
        return Section("all_reduce", "All-reduce", (skip("no estimate: a direction could not be measured"),), {})
    busbw = reach.busbw_bytes_per_s
    findings: tuple[Finding, ...] = (
        ok(
            f"a ring between these hosts reaches at most {busbw / 1e9:.3g} GB/s busbw ({gbit(busbw)} each way), with"
            f" {reach.streams} connection{'' if reach.streams == 1 else 's'}: 1 GiB of gradients on two hosts takes"
            f" {_GIB / busbw:.3g} s or more, a small message {round_trip_s * 1e3:.3g} ms or more"
        ),
        ok(f"what limits it: {reach.text}"),
    )
    if is_encrypted:
        findings += (ok("all rates are of plain TCP; a job of this environment encrypts, which takes CPU time, too"),)
    return Section("all_reduce", "All-reduce", findings, asdict(reach))
