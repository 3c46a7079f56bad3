"""The ranks of a comparison: started with the network that the options name."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_comparison.options import bagua_net_by_activation
from rank_team.placement import HostPlacement, Placement
from rank_team.team import RankTeam, rank_environment

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.backend import PLUGIN_NETWORK, Backend, worker_environment
from bagua.net.bench.nccl_ab.log import network_error, read_proof_file
from core_comparison.options import Options


def start_ranks(options: Options, log_folder: Path, placement: Placement | None = None) -> RankTeam:
    """`placement` is by default this host.

    Raises BenchError when the ranks cannot be started, and when NCCL took another network than was asked for."""
    network = _network(options)
    logs = [log_folder / f"rank{rank}.log" for rank in range(options.ranks)]
    for log in logs:
        log.unlink(missing_ok=True)  # of a team before this one
    team = RankTeam(
        "core_comparison.worker",
        options.ranks,
        options.device,
        timeout_s=options.timeout_s,
        environment=lambda rank: _environment(options, network, logs[rank]),
        placement=placement or HostPlacement(options.sharing),
        join={
            "algorithms": options.algorithms,
            "device": options.device,
            "seed": options.seed,
            "deterministic": options.deterministic,
        },
    )
    if options.network == "tcp" and options.ranks > 1:
        try:
            _check_network(network, logs)
        except BaseException:
            team.close(failed=True)
            raise
    return team


def _network(options: Options) -> Backend:
    """The same for all that is compared here: NCCL reads it once per process."""
    if options.network == "tcp":
        return bagua_net_by_activation()
    return Backend("ranks", "", {"ENABLE_BAGUA_NET": "0"})


def _check_network(network: Backend, logs: list[Path]) -> None:
    assert network.network == PLUGIN_NETWORK
    if error := network_error("--network tcp", network.network, [read_proof_file(log) for log in logs]):
        raise BenchError(error)


def _environment(options: Options, network: Backend, log: Path) -> dict[str, str]:
    inherited = worker_environment(network, os.environ, tcp_only=options.network == "tcp", debug_file=log)
    environment = rank_environment(inherited, settings=network.settings)
    if options.deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return environment
