"""The ranks of the GPU comparison and their processes, one for each backend and rank: all here, or one agent for each
rank that a launcher started.

A request takes the backend by number from the command line of its own host, so that rank 0 can name a backend and never
a command or an environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bagua.net
from bagua.net.bench.driver import NetworkPath
from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing, sharing_of
from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.bench.nccl_ab.backend import Backend, worker_environment
from bagua.net.bench.nccl_ab.options import NcclOptions
from bagua.net.bench.processes import LocalPlace
from bagua.net.bench.rank_process import rank_command
from bagua.net.bench.ranks import MakePlace, Ranks

RANK_PROGRAM = "bagua.net.bench.nccl_ab.rank"


@dataclass(frozen=True)
class RankRequest:
    backend: int
    rank: int
    local_rank: int
    ranks: int
    device: str  # "cuda", over NCCL, or "cpu", over gloo
    tcp_only: bool
    bind: str  # address of rank 0's store
    title: str


@dataclass(frozen=True)
class RankSettings:
    """What each host knows from its own command line."""

    backends: Sequence[Backend]
    timeout_s: float
    log_folder: Path
    environment: Mapping[str, str]
    interface: str | None = None
    sharing: GpuSharing | None = None

    def command(self, request: RankRequest) -> list[str]:
        return rank_command(
            RANK_PROGRAM,
            request.rank,
            request.ranks,
            local_rank=request.local_rank,
            device=request.device,
            backend="nccl" if request.device == "cuda" else "gloo",
            timeout_s=self.timeout_s,
            bind=request.bind,
        )

    def process_environment(self, request: RankRequest) -> dict[str, str]:
        if not 0 <= request.backend < len(self.backends):
            raise BenchError(
                f"backend {request.backend} was asked for, but this rank's command line makes {len(self.backends)};"
                " start every rank with the same options"
            )
        backend = self.backends[request.backend]
        environment = dict(self.environment)
        if self.interface:
            environment["NCCL_SOCKET_IFNAME"] = f"={self.interface}"
            environment["GLOO_SOCKET_IFNAME"] = self.interface
        if self.sharing is not None:
            environment.update(self.sharing.environment(request.rank))
        slug = "".join(letter if letter.isalnum() else "-" for letter in backend.name)
        return worker_environment(
            backend,
            environment,
            tcp_only=request.tcp_only,
            debug_file=self.log_folder / f"{slug}.rank{request.rank}.log",
            # The rank's program is found where this package was, also when that is no installation.
            import_path=[Path(entry).resolve().parents[1] for entry in bagua.net.__path__],
        )


# Importing torch, creating CUDA contexts and NCCL communicators of all sessions at the same time.
START_S = 180.0


def rank_settings(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> RankSettings:
    return RankSettings(
        backends=options.backends,
        timeout_s=max(options.timeout_s, START_S),
        log_folder=logs,
        interface=options.interface,
        environment=environment,
    )


def maker(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> MakePlace:
    settings = rank_settings(options, environment, logs)
    return lambda address, _local_ranks: (LocalPlace(settings), NetworkPath(address, ""))


def own_ranks(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> tuple[Ranks, GpuSharing | None]:
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
    settings = rank_settings(options, {**environment, "LOCAL_WORLD_SIZE": str(ranks)}, logs)
    place = LocalPlace(replace(settings, sharing=sharing))
    return Ranks.local(place, ranks, NetworkPath(LOOPBACK, "")), sharing


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
