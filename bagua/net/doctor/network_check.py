"""Which network interfaces would be used, and is there an RDMA network that they would replace?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bagua.net import native
from bagua.net.doctor.finding import Finding, Section, Status, ok, split_message, warn
from bagua.network_interfaces import has_lost_carrier

# Bridges to containers and virtual machines of the same host. Their usual addresses are the same everywhere.
_BRIDGES = ("docker", "virbr", "lxcbr", "podman", "cni-podman")
_ADDRESSES_OF_EVERY_HOST = ("172.17.0.1", "192.168.122.1", "10.0.3.1")
_JOIN_REMEDY = (
    "name in BAGUA_NET_JOIN_NICS and NCCL_SOCKET_IFNAME the interfaces to join, and have them up before the job starts"
)
_FILTERS = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")
_FORCE_MERGE, _MERGE_LEVEL = "NCCL_NET_FORCE_MERGE", "NCCL_NET_MERGE_LEVEL"


def check_interfaces(environment: Mapping[str, str]) -> Section:
    try:
        rows = native.interfaces(environment)
    except (ValueError, RuntimeError) as error:
        return Section("interfaces", "Interfaces", (split_message(Status.FAIL, str(error)),), {"interfaces": []})
    used = [row for row in rows if row.used]
    # Without a link there is nothing to use, whatever the address says.
    dead = [row for row in rows if row.pci_path and row.address and has_lost_carrier(row.name)]
    usable = [row for row in rows if row.pci_path and row.address and not row.loopback and row not in dead]
    joined, join_findings = _joined(environment, {row.name: row for row in rows})
    findings = [
        _verdict(used),
        *join_findings,
        *_joined_by_nccl(environment),
        *_left_out(used, usable),
        *map(_without_link, dead),
    ]
    table = [("interface", "address", "speed", "NUMA", "used", "why")]
    for row in rows:
        numa = str(row.numa_node) if row.numa_node >= 0 else "-"
        verdict = "yes" if row.used else "no"
        table.append((row.name, row.address or "-", _speed(row.speed_mbps), numa, verdict, row.reason))
    facts = {
        "interfaces": [asdict(row) for row in rows],
        "joined": joined,
        "filters": {name: environment[name] for name in _FILTERS if name in environment},
    }
    return Section("interfaces", "Interfaces", tuple(findings), facts, tuple(table))


def _verdict(used: Sequence[native.Interface]) -> Finding:
    names = ", ".join(row.name for row in used)
    if all(row.loopback for row in used):
        return warn(
            f"only loopback is used ({names}): jobs of one host work, jobs of several do not",
            "bring up a network interface with an address, or correct NCCL_SOCKET_IFNAME",
        )
    inner = [f"{row.name} ({row.address})" for row in used if _is_of_every_host(row)]
    if inner:
        return warn(
            f"{', '.join(inner)} is used, which leads to containers or virtual machines of this host: other hosts have "
            "the same address, and connect to themselves",
            "name the interface of the network between the hosts in NCCL_SOCKET_IFNAME",
        )
    loopbacks = [row.name for row in used if row.loopback]
    if loopbacks:
        others = ", ".join(row.name for row in used if not row.loopback)
        return warn(
            f"loopback ({', '.join(loopbacks)}) is used beside {others}: other hosts cannot be reached over it",
            "leave it out of NCCL_SOCKET_IFNAME",
        )
    return ok(f"used: {names}")


def _joined(
    environment: Mapping[str, str], rows: Mapping[str, native.Interface]
) -> tuple[list[list[str]], list[Finding]]:
    """The groups of several interfaces, and what there is to say of them."""
    try:
        found = native.nic_groups(environment)
    except (ValueError, RuntimeError) as error:
        return [], [split_message(Status.FAIL, str(error))]
    groups = [group for group in found.groups if len(group) > 1]
    findings = []
    for group in groups:
        parts = [rows[name] for name in group]
        known = all(part.speed_mbps > 0 for part in parts)
        total = f", {_speed(sum(part.speed_mbps for part in parts))} in all" if known else ""
        shown = " + ".join(f"{part.name} ({part.address}, {_speed(part.speed_mbps)})" for part in parts)
        findings.append(ok(f"one device: {shown}{total}"))
    findings += [warn(sentence, _JOIN_REMEDY) for sentence in found.lost]
    if len(found.groups) == 1 and not findings and environment.get("BAGUA_NET_JOIN_NICS", "").strip() == "auto":
        findings.append(ok(f"BAGUA_NET_JOIN_NICS=auto: nothing to join, only {found.groups[0][0]}"))
    return groups, findings


def _joined_by_nccl(environment: Mapping[str, str]) -> list[Finding]:
    """What NCCL is told to join. Without that it joins none of Bagua-Net's devices."""
    level = environment.get(_MERGE_LEVEL, "")
    findings = []
    if level and level.upper() != "LOC":
        text = f"{_MERGE_LEVEL}={level}: NCCL joins PCI devices of one NUMA node that are as near as that to each other"
        findings.append(ok(f"{text}; NCCL_DEBUG=INFO shows which"))
    parts = [part for part in environment.get(_FORCE_MERGE, "").split(";") if part]
    groups = [[name.partition(":")[0].strip() for name in part.split(",")] for part in parts]
    if not groups:
        return findings
    try:
        joins = native.nccl_joins(environment, groups)
    except (ValueError, RuntimeError):
        return []  # _joined says why
    for names, refusal in zip(groups, joins.refusals, strict=True):
        missing = [name for name in names if name not in joins.devices]
        if missing:
            findings.append(
                warn(
                    f"{_FORCE_MERGE} names {', '.join(missing)}, and NCCL's devices on this host are "
                    f"{', '.join(joins.devices)}",
                    "correct the name, or leave it out on this host",
                )
            )
        elif refusal:
            findings.append(split_message(Status.WARN, f"{_FORCE_MERGE}: {refusal}"))
        elif len(names) > 1:
            findings.append(ok(f"{_FORCE_MERGE} makes one device of {', '.join(names)}, with NCCL 2.24 or later"))
    return findings


def _left_out(used: Sequence[native.Interface], usable: Sequence[native.Interface]) -> list[Finding]:
    """A slower NIC that is left out is normal: hosts have one for their management."""
    unused = [row for row in usable if not row.used]
    if not unused:
        return []
    count = f"{len(usable) - len(unused)} of {len(usable)} NICs with a link and an address are used"
    shown = ", ".join(f"{row.name} ({_speed(row.speed_mbps)}, {row.reason})" for row in unused)
    fastest = max((row.speed_mbps for row in used if not row.loopback), default=0)
    fast = [row for row in unused if 0 < fastest <= row.speed_mbps]
    if not fast:
        return [ok(f"{count}; not {shown}")]
    names = ",".join([row.name for row in used if not row.loopback] + [row.name for row in fast])
    return [
        warn(
            f"{count}; not {shown}, where the fastest used one has {_speed(fastest)}",
            f"set NCCL_SOCKET_IFNAME={names} if all of them reach the other hosts",
        )
    ]


def _without_link(row: native.Interface) -> Finding:
    return warn(
        f"{row.name} ({row.address}) is switched on but has no link: it is not RUNNING",
        f"check its cable and the switch (ethtool {row.name}), or switch it off: ip link set {row.name} down",
    )


def _is_of_every_host(row: native.Interface) -> bool:
    return row.name.startswith(_BRIDGES) or (not row.pci_path and row.address in _ADDRESSES_OF_EVERY_HOST)


def _speed(mbps: int) -> str:
    if mbps <= 0:
        return "unknown"
    return f"{mbps / 1000:g} Gb/s" if mbps >= 1000 else f"{mbps} Mb/s"


def check_rdma(
    environment: Mapping[str, str], sysfs_root: str = "/sys", device_files: Path = Path("/dev/infiniband")
) -> Section:
    """
    Args:
        sysfs_root: where the ports are listed.
        device_files: without the files there, a container sees the ports and cannot use them.
    """
    try:
        ports, unused = native.rdma_ports(environment, sysfs_root)
    except RuntimeError as error:
        return Section("rdma", "RDMA", (split_message(Status.FAIL, str(error)),))
    if not unused:
        others = ", ".join(f"{port.name} is {port.state}" for port in ports)
        finding = ok("no RDMA port that NCCL would use" + (f" ({others})" if others else ""))
    elif any(device_files.glob("uverbs*")):
        finding = warn(
            f"{unused}, and NCCL uses TCP through Bagua-Net: is that wanted? RDMA is usually faster",
            "set ENABLE_BAGUA_NET=0 to use RDMA, or NCCL_IB_DISABLE=1 to keep TCP without this question",
        )
    else:
        finding = warn(
            f"{unused}, and this environment cannot use it: {device_files} is missing",
            f"start the container with --device={device_files} to use RDMA, or set NCCL_IB_DISABLE=1 if TCP is wanted",
        )
    return Section("rdma", "RDMA", (finding,), {"ports": [asdict(port) for port in ports]})
