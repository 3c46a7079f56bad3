"""The rank processes, seen from the parent: started, asked, ended. Main thread only: they die with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_comparison.options import bagua_net_by_activation

import bagua
from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.endpoint import Event, ask
from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab_contender import PLUGIN_NETWORK, Contender, worker_environment
from bagua.net.bench.nccl_ab_group import Group
from bagua.net.bench.nccl_ab_log import NetworkProof, network_error, read_proof_file
from core_comparison.options import Options
from core_comparison.placement import HostPlacement, Placement

# Interpreters load torch, and the process group forms.
START_TIMEOUT_S = 120.0


class RankTeam:
    """All ranks of one process group. Whatever goes wrong with one of them is a BenchError, after which the team can
    only be closed: the others may be waiting for it in a collective."""

    def __init__(self, options: Options, log_folder: Path, placement: Placement | None = None) -> None:
        """`placement` is by default this host.

        Raises BenchError when the ranks cannot be started, and when NCCL took another network than was asked for."""
        placement = placement or HostPlacement()
        self._drivers = DriverGroup()
        network = _network(options)
        logs = [log_folder / f"rank{rank}.log" for rank in range(options.ranks)]
        for log in logs:
            log.unlink(missing_ok=True)  # of a team before this one
        try:
            workers = [
                self._drivers.start(
                    f"rank {rank}",
                    placement.command(rank, _command(options, rank, alone_on_node=placement.alone_on_node)),
                    {**_environment(options, network, log), **placement.environment(rank)},
                )
                for rank, log in enumerate(logs)
            ]
            self._group = Group(network, workers)
            self._group.form(placement.store_host, START_TIMEOUT_S)
            self.proofs = [read_proof_file(log) for log in logs] if options.device == "cuda" else []
            if options.network == "tcp" and options.ranks > 1:
                _check_network(network, self.proofs)
        except BaseException:
            self._drivers.close(failed=True)
            raise

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of rank 0: the versions of torch and NCCL, the device."""
        return self._group.facts

    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]:
        """One answer of each rank, in their order."""
        return ask(self._group.endpoints, json.dumps({"op": operation, **fields}), operation, timeout_s)

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)


def _network(options: Options) -> Contender:
    """The same for all that is compared here: NCCL reads it once per process."""
    if options.network == "tcp":
        return bagua_net_by_activation()
    return Contender("ranks", "", {"ENABLE_BAGUA_NET": "0"})


def _check_network(network: Contender, proofs: list[NetworkProof]) -> None:
    assert network.network == PLUGIN_NETWORK
    if error := network_error("--network tcp", network.network, proofs):
        raise BenchError(error)


def _command(options: Options, rank: int, *, alone_on_node: bool) -> list[str]:
    command = [
        *(sys.executable, "-m", "core_comparison.worker", f"--rank={rank}", f"--ranks={options.ranks}"),
        *(f"--device={options.device}", f"--contenders={','.join(options.contenders)}", f"--seed={options.seed}"),
        *(f"--timeout-s={options.timeout_s}", f"--parent-pid={os.getpid()}"),
    ]
    command += ["--deterministic"] if options.deterministic else []
    return [*command, "--alone-on-node"] if alone_on_node else command


def _environment(options: Options, network: Contender, log: Path) -> dict[str, str]:
    # The packages are found where the parent found them, also when that is no installation.
    tools = Path(__file__).resolve().parents[1]
    package = Path(bagua.__file__).resolve().parents[1]
    environment = worker_environment(
        network, os.environ, tcp_only=options.network == "tcp", debug_file=log, import_path=[package, tools]
    )
    # A program that uses NVLink multicast can harm other users of a host's GPUs.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return environment
