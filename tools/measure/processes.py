"""The ranks of a run: where they run, how they are started, asked and ended. Their own side is measure.rank.

Started by the main thread only: they die with the thread that started them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from netlab import Lab

import bagua
from bagua.net.bench.api import (
    PLUGIN_NETWORK,
    Backend,
    BenchError,
    DriverGroup,
    Event,
    ask,
    gather,
    gpu_name,
    network_error,
    rank_command,
    read_proof_file,
    worker_environment,
)

# Interpreters load torch, and the process group forms.
START_TIMEOUT_S = 180.0
# Of a collective and of a call, where --timeout does not say it.
_TIMEOUT_S = 300.0
# Of a launcher that the tool itself may run under. Ranks get theirs from measure.rank.
_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT"}
_LAUNCHER_OF_LAB = _LAUNCHER | {"MASTER_ADDR"}


class RanksLostError(Exception):
    """Ranks cannot be started, so no further measurement is possible."""


@dataclass
class Placement:
    """Where ranks run.

    Attributes:
        lab: Its hosts are the ranks' nodes. None: all ranks are one node, this host, and meet over loopback.
        ranks_per_host: In a lab, that many consecutive ranks are on each host.
        sharing: How ranks of this host share GPUs.
        gpus: In a lab, rank k sees GPU k alone, modulo their number.
        interfaces: In a lab, those that NCCL may use; None: all.
    """

    lab: Lab | None = None
    ranks_per_host: int = 1
    sharing: Any = None
    gpus: int | None = None
    interfaces: Any = None

    @property
    def store_host(self) -> str:
        return "127.0.0.1" if self.lab is None else self.lab.hosts[0].address()

    def local_ranks(self, ranks: int) -> int:
        """Of a node, of `ranks` in all."""
        return ranks if self.lab is None else self.ranks_per_host

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """Starts `command` where the rank runs. The process that is started becomes it."""
        return list(command) if self.lab is None else self.lab.entering(rank // self.ranks_per_host, command)

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of one rank, which override those that all ranks have."""
        if self.lab is None:
            return {} if self.sharing is None else self.sharing.environment(rank)
        settings = self.lab.rank_environment(*divmod(rank, self.ranks_per_host), self.ranks_per_host)
        found = {name: value for name, value in settings.items() if name not in _LAUNCHER_OF_LAB}
        if self.interfaces is not None:
            found["NCCL_SOCKET_IFNAME"] = "=" + ",".join(self.interfaces)
        return found if self.gpus is None else {**found, "CUDA_VISIBLE_DEVICES": gpu_name(rank % self.gpus)}


def bagua_net_by_activation() -> Backend:
    """What a user does, unlike bagua-net-bench, which names the library: the package's own activation is tested."""
    return Backend("bagua-net", PLUGIN_NETWORK, {"ENABLE_BAGUA_NET": "1"}, is_ours=True)


@dataclass
class Ranks:
    """The ranks of one process group: started on first use or by `start` and `form`, and anew after a failure, because
    those that remain may be stuck in a collective. A context manager. Whatever goes wrong with one of them is a
    BenchError.

    Args:
        tool: The module whose functions the ranks call; see measure.rank.
        options: What the ranks are told of `given`.
        backend: The network that NCCL uses, with a log of each rank in `log_folder`. NCCL reads its settings once
            per process, so each backend has ranks of its own.
        tcp_only: NCCL uses neither P2P nor shared memory.
        shows_network: It is an error at the start if NCCL's logs show another network than the backend's.
        renews: Whether they are started anew.
        settings: Environment variables, on top of all others.

    Attributes:
        starts: How often ranks were started. Each start repeats the initialization of the processes.
        facts: What the last ones reported about themselves.
    """

    given: argparse.Namespace
    tool: str
    options: Sequence[str] = ()
    placement: Placement | None = None
    backend: Backend | None = None
    log_folder: Path | None = None
    tcp_only: bool = True
    shows_network: bool = False
    renews: bool = True
    settings: Mapping[str, str] | None = None
    starts: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._timeout_s = getattr(self.given, "timeout", _TIMEOUT_S)
        self._placement = self.placement or Placement(sharing=self.given.sharing)
        folder = self.log_folder
        self.logs = [] if folder is None else [folder / f"rank{rank}.log" for rank in range(self.given.ranks)]
        self._drivers = DriverGroup()
        self._ranks: list[Any] = []
        self._is_formed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def start(self) -> None:
        """Starts the interpreters, which load torch."""
        for log in self.logs:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)  # of ranks before these
        self.starts += 1
        given, placement = self.given, self._placement
        try:
            for rank in range(given.ranks):
                command = rank_command(
                    "measure.rank",
                    rank,
                    given.ranks,
                    # In a lab a rank sees one GPU, or one that it shares.
                    local_rank=rank if placement.lab is None else 0,
                    device=given.device,
                    backend="cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo",
                    timeout_s=self._timeout_s,
                    bind="127.0.0.1",
                )
                environment = {**self._environment(rank), **placement.environment(rank)}
                self._ranks.append(self._drivers.start(f"rank {rank}", placement.command(rank, command), environment))
        except BaseException:
            self.close(failed=True)
            raise

    def form(self) -> None:
        """Makes the process group of the started interpreters. Any thread."""
        store = gather(self._ranks[:1], "store", START_TIMEOUT_S, "starting")[0]
        line = {"op": "join", "host": self._placement.store_host, "port": store["port"], "tool": self.tool}
        line["options"] = {name: getattr(self.given, name) for name in self.options}
        line["local_ranks"] = self._placement.local_ranks(self.given.ranks)
        self.facts = ask(self._ranks, json.dumps(line), "ready", START_TIMEOUT_S)[0]
        self._is_formed = True
        if self.shows_network and self.given.ranks > 1 and (fault := self.network_fault("--network tcp")):
            raise BenchError(fault)

    def ready(self) -> Self:
        """Raises RanksLostError: they cannot be started."""
        if not self._is_formed and (self.renews or not self.starts):
            try:
                self.start()
                self.form()
            except BenchError as error:
                self.close(failed=True)
                raise RanksLostError(f"the ranks could not be started: {error}") from error
        return self

    def call(self, function: str, timeout_s: float | None = None, **fields: object) -> list[Event]:
        """What a function of the tool's module returns on each rank, in their order. A failure ends all ranks."""
        self.ready()
        if not self._is_formed:
            raise BenchError("its ranks have ended")
        line = json.dumps({"op": "call", "function": function, "fields": fields})
        try:
            return ask(self._ranks, line, "call", self._timeout_s if timeout_s is None else timeout_s)
        except BenchError:
            self.close(failed=True)
            raise

    def network_fault(self, name: str) -> str | None:
        """What NCCL's logs show of another network than the backend's."""
        assert self.backend is not None
        return network_error(name, self.backend.network, [read_proof_file(log) for log in self.logs])

    def network_seen(self) -> str:
        return "; ".join(dict.fromkeys(read_proof_file(log).summary() for log in self.logs))

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)
        self._ranks.clear()
        self._is_formed = False

    def _environment(self, rank: int) -> dict[str, str]:
        inherited: Mapping[str, str] = os.environ
        settings = dict(self.settings or {})
        if self.backend is not None:
            inherited = worker_environment(self.backend, os.environ, tcp_only=self.tcp_only, debug_file=self.logs[rank])
            local = self._placement.local_ranks(self.given.ranks)
            # As launchers say it: the plugin shares the CPUs out by it.
            settings = {**self.backend.settings, **settings, "LOCAL_WORLD_SIZE": str(local)}
        found = {name: value for name, value in inherited.items() if name not in _LAUNCHER}
        # The package is found where the parent found it, also when that is no installation.
        paths = [Path(bagua.__file__).resolve().parents[1], Path(__file__).resolve().parents[1]]
        further = found.get("PYTHONPATH")
        found["PYTHONPATH"] = ":".join([*map(str, paths), *([further] if further else [])])
        found["PYTHONSAFEPATH"] = "1"  # the working directory may be a checkout, without compiled modules
        found["ENABLE_BAGUA_NET"] = "0"
        found["OMP_NUM_THREADS"] = "1"
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # A program that uses NVLink multicast can harm other users of a host's GPUs.
        found.setdefault("NCCL_NVLS_ENABLE", "0")
        if getattr(self.given, "deterministic", False):
            found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        return {**found, **settings}


def start_all(ranks: Mapping[str, Ranks]) -> dict[str, str]:
    """Starts several groups of ranks, whose interpreters load at the same time. Returns the failures by name; those
    ranks are closed."""
    failures: dict[str, str] = {}
    for step in ("start", "form"):
        for name, one in ranks.items():
            if name in failures:
                continue
            try:
                getattr(one, step)()
            except BenchError as error:
                failures[name] = str(error)
                one.close(failed=True)
    return failures
