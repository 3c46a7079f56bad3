"""`bagua-net doctor` on hosts (network namespaces), as a user starts it: --peer between two of them, and that what it
says of joined interfaces is what the plugin does there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.lab_traffic import until
from support.labs import NEEDS_LAB, Lab
from support.processes import wait_until

pytestmark = NEEDS_LAB

_PEER = "10.77.0.2"
_TOKEN = "abcdefghijklmnop"
_OTHER_VERSION = """
import sys, bagua.version
bagua.version.__version__ = "0.9.1"
from bagua.cli.net import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(rate_mbit=200, per_flow_mbit=40, mtu=1300) as lab:
        yield lab


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "NCCL_IB_DISABLE": "1", "NO_COLOR": "1"}


def doctor(*words: str) -> list[str]:
    return [str(Path(sys.executable).parent / "bagua-net"), "doctor", *words]


def serving(lab: Lab, variables: dict[str, str], command: Sequence[str]) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return lab.start(1, command, variables, **pipes)


def test_a_capped_network_with_a_small_mtu_and_a_peer_of_another_version(lab: Lab, variables: dict[str, str]) -> None:
    def examine() -> dict[str, Any]:
        other = [sys.executable, "-c", _OTHER_VERSION, "doctor", "--serve", "--token", _TOKEN]
        with serving(lab, variables, other) as serve:
            words = doctor("--peer", _PEER, "--token", _TOKEN, "--json", "--seconds", "0.25")
            result = lab.run(0, words, variables)
            said = serve.communicate(timeout=60)[0]
        assert result.returncode == 0, result.stderr + said
        assert "examined by 10.77.0.1" in said
        return dict(json.loads(result.stdout)["sections"])

    sections = until(lambda sections: not _wrong_rates(sections), examine)
    assert not _wrong_rates(sections)
    assert sections["mtu"]["facts"]["path_mtu"] == 1300
    assert "and 0.9.1 there" in sections["versions"]["findings"][0]["text"]
    assert [finding["status"] for finding in sections["route"]["findings"]] == ["ok", "ok"]


def _wrong_rates(sections: dict[str, Any]) -> list[str]:
    """In Mb/s. Payload is less than the rate; the token buckets start full."""
    rates = {(r["direction"], r["streams"]): r["median"] * 8e-6 for r in sections["bandwidth"]["facts"]["rates"]}
    reach = sections["all_reduce"]["facts"]
    connection, ring = ((reach[f"{name}_bytes_per_s"] or 0) * 8e-6 for name in ("per_connection", "busbw"))
    wrong = [f"{direction}: {rates}" for direction in ("sent", "received") if not _are_of_the_link(rates, direction)]
    return wrong + [f"all-reduce: {reach}"] * (not (20 < connection < 60 and ring > 100))


def _are_of_the_link(rates: dict[tuple[str, int], float], direction: str) -> bool:
    one, four, sixteen = (rates[direction, streams] for streams in (1, 4, 16))
    return 20 < one < 60 and four > 2 * one and 100 < sixteen < 300


def test_each_pair_of_joined_interfaces_is_measured(variables: dict[str, str]) -> None:
    joined = {**variables, "BAGUA_NET_JOIN_NICS": "auto", "NCCL_SOCKET_IFNAME": "=eth0,eth1,eth2"}
    with Lab(nics=3, rate_mbit=(200, 100, 100), ip_versions=(4,)) as lab:
        # The peer's third interface is not in the device that the first two are here.
        own = {**joined, "NCCL_SOCKET_IFNAME": "=eth0,eth1"}

        def examine() -> dict[str, Any]:
            with serving(lab, joined, doctor("--serve", "--token", _TOKEN)) as serve:
                words = doctor("--peer", _PEER, "--token", _TOKEN, "--json", "--seconds", "0.25")
                result = lab.run(0, words, own)
                said = serve.communicate(timeout=60)[0]
            assert result.returncode == 0, result.stderr + said
            return dict(json.loads(result.stdout)["sections"])

        def rates(sections: dict[str, Any]) -> list[float]:
            return [
                pair[f"{way}_bytes_per_s"] * 8e-6
                for pair in sections["joined"]["facts"]["pairs"]
                for way in ("sent", "received")
            ]

        def are_of_the_links(sections: dict[str, Any]) -> bool:
            return all(
                0.5 * mbit < rate < 1.5 * mbit for rate, mbit in zip(rates(sections), (200, 200, 100, 100), strict=True)
            )

        sections = until(are_of_the_links, examine)
        assert are_of_the_links(sections), rates(sections)
        pairs = sections["joined"]["facts"]["pairs"]
        assert [(pair["here"], pair["remote_address"]) for pair in pairs] == [
            ("eth0", "10.77.0.2"),
            ("eth1", "10.77.1.2"),
        ]
        assert sections["joined"]["findings"][-1]["text"].startswith("eth2 there: the kernel routes to no joined")
        ring = sections["all_reduce"]["facts"]
        assert ring["limit"] == "joined"
        assert ring["busbw_bytes_per_s"] == pytest.approx(min(sum(rates(sections)[way::2]) for way in (0, 1)) / 8e-6)


def test_a_peer_that_is_killed_in_the_middle(lab: Lab, variables: dict[str, str], tmp_path: Path) -> None:
    with serving(lab, variables, doctor("--serve", "--token", _TOKEN)) as serve, (tmp_path / "said").open("w") as said:
        words = doctor("--peer", _PEER, "--token", _TOKEN, "--seconds", "5")
        asking = lab.start(0, words, variables, stdout=said, stderr=said)
        wait_until(lambda: "raw x1" in (tmp_path / "said").read_text(), "the first transfer")
        serve.kill()
        assert asking.wait(60) == 1
    text = (tmp_path / "said").read_text()
    assert f"the connection to {_PEER} is lost" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("logs_in", [True, False])
def test_over_ssh(lab: Lab, variables: dict[str, str], tmp_path: Path, logs_in: bool) -> None:
    """`ssh` is played: it runs the command on the other host of the lab."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    entering = f"nsenter --net={lab.hosts[1].namespace.path} sh -c"
    run = f'for word; do :; done; exec {entering} "$word"' if logs_in else "echo Permission denied; exit 255"
    ssh.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{run}\n')
    ssh.chmod(0o755)
    path = {**variables, "PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"}
    result = lab.run(0, doctor("--peer", _PEER, "--ssh", "me@b", "--seconds", "0.05"), path)
    arguments = (tmp_path / "arguments").read_text()
    assert "BatchMode=yes" in arguments
    assert "-- me@b " in arguments
    if logs_in:
        assert result.returncode == 0, result.stderr
        assert "a ring between these hosts reaches at most" in result.stdout.replace("\n       ", "")
        # Of the bandwidth, too, where the machine is busy.
        assert re.search(r"^The hosts can communicate, \d warnings? \(.*\bMTU\b.*\)\.$", result.stdout, re.MULTILINE)
    else:
        assert result.returncode == 1
        assert "`bagua-net doctor --serve` on me@b ended with exit code 255\n  Permission denied" in result.stderr


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
