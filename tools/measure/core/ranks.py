"""The ranks of a comparison: started with the network that the options name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from bagua.net.bench.api import PLUGIN_NETWORK, Backend, BenchError, network_error, read_proof_file, worker_environment
from measure.ranks.placement import Placement
from measure.ranks.team import RankTeam, rank_environment


def bagua_net_by_activation() -> Backend:
    """What a user does, unlike bagua-net-bench, which names the library: the package's own activation is tested."""
    return Backend("bagua-net", PLUGIN_NETWORK, {"ENABLE_BAGUA_NET": "1"}, is_ours=True)


def start_ranks(given: argparse.Namespace, log_folder: Path, placement: Placement) -> RankTeam:
    """Raises BenchError when the ranks cannot be started, and when NCCL took another network than was asked for."""
    is_tcp = given.network == "tcp"
    network = bagua_net_by_activation() if is_tcp else Backend("ranks", "", {"ENABLE_BAGUA_NET": "0"})
    team, logs = start_on_network(given, network, log_folder, tcp_only=is_tcp, placement=placement)
    if is_tcp and given.ranks > 1 and (error := network_fault("--network tcp", network, logs)):
        team.close(failed=True)
        raise BenchError(error)
    return team


def network_fault(name: str, network: Backend, logs: list[Path]) -> str | None:
    return network_error(name, network.network, [read_proof_file(log) for log in logs])


def start_on_network(
    given: argparse.Namespace,
    network: Backend,
    log_folder: Path,
    *,
    tcp_only: bool,
    placement: Placement,
    form: bool = True,
    module: str = "measure.core.worker",
    join: Sequence[str] = ("algorithms", "device", "seed", "deterministic"),
) -> tuple[RankTeam, list[Path]]:
    """The ranks, and NCCL's log of each: it reads its network's settings once per process. `form`, `module`: see
    RankTeam. `join`: the options that the ranks are told."""
    logs = [log_folder / f"rank{rank}.log" for rank in range(given.ranks)]
    for log in logs:
        log.unlink(missing_ok=True)  # of a team before this one

    def environment(rank: int) -> dict[str, str]:
        inherited = worker_environment(network, os.environ, tcp_only=tcp_only, debug_file=logs[rank])
        found = rank_environment(inherited, settings=network.settings)
        if given.deterministic:
            found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # As launchers say it: the plugin shares the CPUs out by it.
        return {**found, "LOCAL_WORLD_SIZE": "1" if placement.alone_on_node else str(given.ranks)}

    team = RankTeam(
        module,
        given.ranks,
        given.device,
        timeout_s=given.timeout,
        environment=environment,
        placement=placement,
        join={name: getattr(given, name) for name in join},
        form=form,
    )
    return team, logs
