"""Which network interfaces would be used, and is there an RDMA network that they would replace?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from bagua.net import native, rdma
from bagua.net.doctor.finding import Finding, Section, Status, ok, split_message, warn

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
    return ok(f"used: {names}")


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
