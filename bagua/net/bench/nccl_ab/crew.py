"""The ranks of a comparison, and who starts them: all here, or one agent for each rank that a launcher started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing, sharing_of
from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.bench.nccl_ab.options import NcclOptions
from bagua.net.bench.nccl_ab.workers import WorkerSettings
from bagua.net.bench.network_path import NetworkPath
from bagua.net.bench.places import LocalPlace
from bagua.net.bench.team import MakePlace, Team

# Importing torch, creating CUDA contexts and NCCL communicators of all groups at the same time.
START_S = 180.0


def worker_settings(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> WorkerSettings:
    return WorkerSettings(
        backends=options.backends,
        timeout_s=max(options.timeout_s, START_S),
        log_folder=logs,
        interface=options.interface,
        environment=environment,
    )


def maker(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> MakePlace:
    settings = worker_settings(options, environment, logs)
    return lambda address, _local_ranks: (LocalPlace(settings), NetworkPath(address, ""))


def local_team(options: NcclOptions, environment: Mapping[str, str], logs: Path) -> tuple[Team, GpuSharing | None]:
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
    place = LocalPlace(replace(settings, sharing=sharing))
    return Team.local(place, ranks, NetworkPath(LOOPBACK, "")), sharing


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
