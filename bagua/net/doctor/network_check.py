"""Which network interfaces would be used, and is there an RDMA network that they would replace?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bagua.net import native, rdma
from bagua.net.doctor.finding import Finding, Section, Status, ok, split_message, warn

# Bridges to containers and virtual machines of the same host. Their usual addresses are the same everywhere.
_BRIDGES = ("docker", "virbr", "lxcbr", "podman", "cni-podman")
_ADDRESSES_OF_EVERY_HOST = ("172.17.0.1", "192.168.122.1", "10.0.3.1")
_FILTERS = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY")


def check_interfaces(environment: Mapping[str, str]) -> Section:
    try:
        rows = native.interfaces(environment)
    except (ValueError, RuntimeError) as error:
        return Section("interfaces", "Interfaces", (split_message(Status.FAIL, str(error)),), {"interfaces": []})
    used = [row for row in rows if row.used]
    findings = [_verdict(used)]
    table = [("interface", "address", "speed", "NUMA", "used", "why")]
    for row in rows:
        numa = str(row.numa_node) if row.numa_node >= 0 else "-"
        verdict = "yes" if row.used else "no"
        table.append((row.name, row.address or "-", _speed(row.speed_mbps), numa, verdict, row.reason))
    facts = {
        "interfaces": [row.as_json() for row in rows],
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
        return warn(
            f"loopback ({', '.join(loopbacks)}) is used beside {names}: other hosts cannot be reached over it",
            "leave it out of NCCL_SOCKET_IFNAME",
        )
    return ok(f"used: {names}")


def _is_of_every_host(row: native.Interface) -> bool:
    return row.name.startswith(_BRIDGES) or (not row.pci_path and row.address in _ADDRESSES_OF_EVERY_HOST)


def _speed(mbps: int) -> str:
    if mbps <= 0:
        return "unknown"
    return f"{mbps / 1000:g} Gb/s" if mbps >= 1000 else f"{mbps} Mb/s"


def check_rdma(ports: Sequence[rdma.RdmaPort], environment: Mapping[str, str]) -> Section:
    if not ports:
        finding = ok("no active RDMA port: nothing faster is replaced")
    elif not rdma.is_used_by_nccl(environment):
        finding = ok("NCCL_IB_DISABLE keeps NCCL from the RDMA network: nothing faster is replaced")
    else:
        finding = split_message(Status.WARN, rdma.replacement_warning(list(ports)))
    return Section("rdma", "RDMA", (finding,), {"ports": [asdict(port) for port in ports]})
