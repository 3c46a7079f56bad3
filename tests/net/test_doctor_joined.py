"""What `bagua-net doctor` says of joined interfaces is what the plugin does on that host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from support.labs import NEEDS_LAB, Lab

pytestmark = NEEDS_LAB


def _sections(lab: Lab, **variables: str) -> dict[str, Any]:
    environment = {**os.environ, **lab.rank_environment(0), **variables}
    with lab.inside(0):
        result = subprocess.run(
            [sys.executable, "-m", "bagua.cli.net", "doctor", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    sections: dict[str, Any] = json.loads(result.stdout)["sections"]
    return sections


def _interfaces_section(lab: Lab, **variables: str) -> dict[str, Any]:
    section: dict[str, Any] = _sections(lab, **variables)["interfaces"]
    return section


def test_the_self_test_passes_where_interfaces_are_joined_by_name() -> None:
    with Lab(nics=2, ip_versions=(4,)) as lab:
        sections = _sections(lab, BAGUA_NET_JOIN_NICS="eth0+eth1")
        assert sections["interfaces"]["facts"]["joined"] == [["eth0", "eth1"]]
        assert sections["self_test"]["facts"]["passed"] is True, sections["self_test"]


def test_joined_interfaces_of_a_host() -> None:
    with Lab(nics=3, ip_versions=(4,)) as lab:
        for value, selected, joined in (
            ("eth2+eth0", "=eth0,eth1,eth2", [["eth0", "eth2"]]),
            ("auto", "=eth0,eth1", [["eth0", "eth1"]]),
            ("off", "=eth0,eth1", []),
        ):
            section = _interfaces_section(lab, BAGUA_NET_JOIN_NICS=value, NCCL_SOCKET_IFNAME=selected)
            assert section["facts"]["joined"] == joined, value
        section = _interfaces_section(lab, BAGUA_NET_JOIN_NICS="auto", NCCL_SOCKET_IFNAME="")
        assert section["facts"]["joined"] == []
        assert "auto joins only what NCCL_SOCKET_IFNAME selects, and that is not set" in json.dumps(section)
        section = _interfaces_section(lab, BAGUA_NET_JOIN_NICS="eth8+eth9", NCCL_SOCKET_IFNAME="=eth0")
        assert section["status"] == "fail"
        assert "names eth8, eth9, and NCCL uses eth0 on this host" in json.dumps(section)
        merge = {"NCCL_SOCKET_IFNAME": "=eth0,eth1,eth2", "BAGUA_NET_RAILS": "1"}
        for variables, said in (
            ({"NCCL_NET_FORCE_MERGE": "eth0,eth7"}, "names eth7, and NCCL's devices on this host are eth0, eth1, eth2"),
            ({"NCCL_NET_FORCE_MERGE": "eth0,eth1;eth2"}, " is not a PCI device, and NCCL joins only these"),
            ({"NCCL_NET_MERGE_LEVEL": "PHB"}, "NCCL_NET_MERGE_LEVEL=PHB: NCCL joins PCI devices of one NUMA node"),
        ):
            assert said in json.dumps(_interfaces_section(lab, **merge, **variables))
        assert "NCCL joins" not in json.dumps(_interfaces_section(lab, **merge, NCCL_NET_MERGE_LEVEL="LOC"))
