"""`bagua-net blame` among hosts (network namespaces) of which one is cut off, and then dies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fresh_process import RunCommand
from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab, cut_nic
from support.load_driver import LoadDriver, connect_ring, plugin_library
from support.processes import wait_until

pytestmark = NEEDS_LAB

RANKS = 3
LARGE, SMALL = 32 << 20, 3000  # more than the socket buffers hold, and so little that a send is done at once
NOBODY = "02:00:00:00:00:99"


@contextmanager
def connected_ring(lab: Lab, tmp_path: Path, environment: dict[str, str]) -> Iterator[list[LoadDriver]]:
    ranks: list[LoadDriver] = []
    options = ["--nranks", RANKS, "--device", 0, "--transport", "plugin", "--library", plugin_library()]
    settings = {"BAGUA_NET_STALL_S": "1", "BAGUA_NET_KEEPALIVE_S": "120", "BAGUA_DRIVER_LOG": "warn"}
    try:
        for rank in range(RANKS):
            variables = {**environment, **lab.rank_environment(rank), **settings}
            with lab.inside(rank):
                log = tmp_path / f"rank{rank}.log"
                ranks.append(LoadDriver(["ring", "--rank", rank, *options], variables, log))
        connect_ring(ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def cut_off(lab: Lab, cut: int) -> None:
    """What goes from or to this host is sent to a network card that does not exist."""
    for host in range(RANKS):
        for other in range(RANKS):
            if host != other and cut in (host, other):
                words = [lab.hosts[other].address(), "lladdr", NOBODY, "nud", "permanent", "dev", "eth0"]
                lab.run(host, ["ip", "neigh", "replace", *words], check=True)


@pytest.mark.parametrize("message_bytes", [LARGE, SMALL])
def test_a_rank_that_is_cut_off_and_then_dies(
    run_command: RunCommand, environment: dict[str, str], tmp_path: Path, message_bytes: int
) -> None:
    def blamed() -> set[tuple[int, str]]:
        words = [sys.executable, "-m", "bagua.cli.net", "blame", "--after", "0.5", "--json"]
        shown = run_command(words, environment)
        assert shown.returncode in (0, 1), shown.stderr
        return {(one["party"]["pid"], one["kind"]) for one in json.loads(shown.stdout)["culprits"]}

    with Lab(hosts=RANKS, ip_versions=(4,)) as lab, connected_ring(lab, tmp_path, environment) as ranks:
        pids = [rank.process.pid for rank in ranks]
        cut_off(lab, 2)
        for rank in ranks:
            rank.say(f"verify {message_bytes}")
        # Rank 1 sends to rank 2, and rank 2 to rank 0.
        broken = {(pids[0], "network"), (pids[2], "network")}
        wait_until(lambda: broken <= blamed(), "the broken paths")
        assert (pids[1], "network") not in blamed()
        wait_until(lambda: f"process {pids[2]}" in ranks[0].log(), "the line of rank 0")
        if message_bytes == LARGE:
            # Its first line may come before the kernel has sent the data again three times.
            wait_until(lambda: "the host or the network is down" in ranks[1].log(), "the line of rank 1")
        ranks[2].process.kill()
        ranks[2].process.wait()
        wait_until(lambda: (pids[2], "ended") in blamed(), "the rank that died")


def test_a_joined_device_whose_last_nic_is_cut_off(run_command: RunCommand, environment: dict[str, str]) -> None:
    """The device is named as NCCL knows it, and the NIC that its host lost."""

    def culprits() -> list[dict[str, Any]]:
        """Of this ring: other tests may run processes at the same time."""
        words = [sys.executable, "-m", "bagua.cli.net", "blame", "--after", "0.5", "--json"]
        shown = run_command(words, environment)
        found: list[dict[str, Any]] = json.loads(shown.stdout)["culprits"]
        return [one for one in found if one["party"]["pid"] in (ring.pid(0), ring.pid(1))]

    def is_the_path(one: dict[str, Any]) -> bool:
        told = ("over eth0+eth1", "eth1 lost its address")
        return one["kind"] == "network" and all(text in one["problem"] for text in told)

    settings = {**environment, "BAGUA_NET_JOIN_NICS": "auto", "BAGUA_NET_RAILS": "1", "BAGUA_NET_KEEPALIVE_S": "120"}
    with (
        Lab(nics=2, rate_mbit=400, ip_versions=(4,)) as lab,
        Ring(lab, env=settings, timeout_ms=120_000) as ring,
    ):
        ring.connect()
        ring.verify(4 << 20)
        with cut_nic(lab, 0, 1, "address removed"):
            ring.verify(4 << 20)
            assert culprits() == []
            with cut_nic(lab, 0, 0, "silent"):
                ring.start_verify(LARGE)
                wait_until(lambda: len(both := culprits()) == 2 and all(map(is_the_path, both)), "both directions")
        ring.finish_verify(LARGE)
        ring.quit()
