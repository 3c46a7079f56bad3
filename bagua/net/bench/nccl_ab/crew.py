"""The ranks of a comparison, and who starts them: all here, or one agent for each rank that a launcher started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing, sharing_of
from bagua.net.bench.launch_environment import LOOPBACK, LaunchEnvironment
from bagua.net.bench.nccl_ab.options import NcclOptions
from bagua.net.bench.nccl_ab.places import LocalWorkers, RemoteWorkers, WorkerSettings
from bagua.net.bench.rendezvous import Member, meet

# Importing torch, creating CUDA contexts and NCCL communicators of all groups at the same time.
START_S = 180.0


@dataclass(frozen=True)
class Crew:
    """The ranks of a run: which place starts each, on which of its host's GPUs."""

    local: LocalWorkers
    remote: Mapping[int, RemoteWorkers]  # by rank; every other rank is started here
    local_ranks: Sequence[int]  # by rank
    hosts: int
    bind: str
    sharing: GpuSharing | None = None

    @property
    def ranks(self) -> int:
        return len(self.local_ranks)

    @property
    def ranks_per_gpu(self) -> int:
        """At most."""
        return 1 if self.sharing is None else -(-self.ranks // self.sharing.gpus)

    @property
    def places(self) -> list[LocalWorkers | RemoteWorkers]:
        return [self.local, *self.remote.values()]


def worker_settings(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> WorkerSettings:
    return WorkerSettings(
        backends=options.backends,
        backend=options.backend,
        device=options.device,
        dtype=options.dtype,
        timeout_s=max(options.timeout_s, START_S),
        log_folder=logs,
        interface=options.interface,
        environment=environment,
    )


def local_crew(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> Crew:
    ranks, sharing = options.ranks or 2, None
    if options.device == "cuda":
        gpus = _gpu_count()
        ranks = options.ranks or (max(gpus, 2) if options.share_gpus else gpus)
        if gpus < (1 if options.share_gpus else 2):
            share = "add --share-gpus to have several ranks on one, " if gpus else ""
            raise BenchError(
                f"--nccl needs 2 GPUs or more, and torch sees {gpus}; {share}look at CUDA_VISIBLE_DEVICES and"
                " nvidia-smi, or leave --nccl out to measure the plugin without GPUs"
            )
        if ranks > gpus and not options.share_gpus:
            raise BenchError(
                f"--ranks {ranks} needs as many GPUs, and torch sees {gpus}; give {gpus} or fewer, or add --share-gpus"
            )
        sharing = sharing_of(ranks, gpus, environment)
        if sharing is not None:
            _check_tcp(options, ranks, gpus)
    # As launchers say it: the plugin shares the CPUs out by it. Of GPUs there may be more than ranks.
    settings = worker_settings(options, {**environment, "LOCAL_WORLD_SIZE": str(ranks)}, logs)
    workers = LocalWorkers(replace(settings, sharing=sharing))
    return Crew(workers, {}, list(range(ranks)), 1, LOOPBACK, sharing)


def _check_tcp(options: NcclOptions, ranks: int, gpus: int) -> None:
    """Ranks that share a GPU are on different hosts, as NCCL sees it."""
    without_tcp = [backend.name for backend in options.backends if backend.shared_memory]
    if options.tcp_only is False:
        without_tcp.append("--no-tcp-only")
    if without_tcp:
        raise BenchError(
            f"{', '.join(without_tcp)}: {ranks} ranks that share {gpus} GPU{'' if gpus == 1 else 's'} reach each other"
            " over TCP only; leave it out, or give each rank a GPU (without --share-gpus)"
        )


def _gpu_count() -> int:
    import torch

    # Counts through the driver library, without a CUDA context in this process.
    return torch.cuda.device_count()


def leading_crew(launch: LaunchEnvironment, options: NcclOptions, environment: Mapping[str, str], logs: Path) -> Crew:
    members = meet(launch, options.timeout_s, lambda text: print(text, file=sys.stderr, flush=True))
    seen: list[str] = []
    local_ranks = []
    for member in members:
        local_ranks.append(seen.count(member.identity))
        seen.append(member.identity)
    remote = {
        member.rank: RemoteWorkers(member.connection, member.host, member.rank)
        for member in members
        if member.connection is not None
    }
    local = LocalWorkers(worker_settings(options, environment, logs))
    return Crew(local, remote, local_ranks, len(set(seen)), _address_towards_others(members))


def _address_towards_others(members: Sequence[Member]) -> str:
    """The address by which a rank of another host (or else of this one) reached this process."""
    connections = [(member.identity == members[0].identity, member.connection) for member in members]
    reached = sorted((same, index) for index, (same, connection) in enumerate(connections) if connection is not None)
    connection = members[reached[0][1]].connection
    assert connection is not None
    return connection.local_address
