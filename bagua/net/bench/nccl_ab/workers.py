"""The processes of the GPU comparison: one for each backend and rank.

A request takes the backend by number from the command line of its own host, so that rank 0 can name a backend and never
a command or an environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import bagua.net
from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.nccl_ab.backend import Backend, worker_environment
from bagua.net.bench.rank_process import rank_command

RANK_PROGRAM = "bagua.net.bench.nccl_ab.worker"


@dataclass(frozen=True)
class WorkerRequest:
    backend: int
    rank: int
    local_rank: int
    ranks: int
    device: str  # "cuda", over NCCL, or "cpu", over gloo
    tcp_only: bool
    bind: str  # address of rank 0's store
    title: str


@dataclass(frozen=True)
class WorkerSettings:
    """What each host knows from its own command line."""

    backends: Sequence[Backend]
    timeout_s: float
    log_folder: Path
    environment: Mapping[str, str]
    interface: str | None = None
    sharing: GpuSharing | None = None

    def command(self, request: WorkerRequest) -> list[str]:
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

    def process_environment(self, request: WorkerRequest) -> dict[str, str]:
        if not 0 <= request.backend < len(self.backends):
            raise BenchError(
                f"backend {request.backend} was asked for, but this rank's command line makes {len(self.backends)};"
                " start every rank with the same options"
            )
        backend = self.backends[request.backend]
        environment = {**self.environment, "PYTHONSAFEPATH": "1"}
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
            # The worker is found where this package was, also when that is no installation.
            import_path=[Path(entry).resolve().parents[1] for entry in bagua.net.__path__],
        )
