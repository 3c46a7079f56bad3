"""Where workers are started: on this machine, or by the agent of a launched rank on its own host.

Same connection and same orders as bagua.net.bench.remote_place ({"id", "start"}, {"id", "line"}, {"finish"}); what is
started is a worker of a backend instead of a load driver. The agent takes the backend by number from its own
command line, so that rank 0 can name a backend and never a command or an environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import bagua.net
from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Endpoint
from bagua.net.bench.errors import BenchError
from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.nccl_ab.backend import Backend, worker_environment
from bagua.net.bench.remote_place import RemoteDriver, RemotePlace, serve
from bagua.net.bench.rendezvous import LineConnection


@dataclass(frozen=True)
class WorkerRequest:
    backend: int
    rank: int
    local_rank: int
    ranks: int
    tcp_only: bool
    bind: str  # address of rank 0's store


@dataclass(frozen=True)
class WorkerSettings:
    """What each host knows from its own command line."""

    backends: Sequence[Backend]
    backend: str
    device: str
    dtype: str
    timeout_s: float
    log_folder: Path
    interface: str | None
    environment: Mapping[str, str]
    sharing: GpuSharing | None = None

    def command(self, request: WorkerRequest) -> list[str]:
        return [
            sys.executable,
            "-m",
            "bagua.net.bench.nccl_ab.worker",
            f"--rank={request.rank}",
            f"--ranks={request.ranks}",
            f"--local-rank={request.local_rank}",
            f"--backend={self.backend}",
            f"--device={self.device}",
            f"--dtype={self.dtype}",
            f"--bind={request.bind}",
            f"--timeout-s={self.timeout_s}",
            f"--parent-pid={os.getpid()}",
        ]

    def worker_environment(self, request: WorkerRequest) -> dict[str, str]:
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
            # The worker is found where this package was, also when that is no installation.
            import_path=[Path(entry).resolve().parents[1] for entry in bagua.net.__path__],
        )


class LocalWorkers:
    """Starts workers on this machine and owns them. Main thread only: the workers' parent-death signal follows it."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._workers: list[DriverProcess] = []

    def start(self, request: WorkerRequest) -> DriverProcess:
        if not 0 <= request.backend < len(self.settings.backends):
            raise BenchError(
                f"backend {request.backend} was asked for, but this rank's command line makes"
                f" {len(self.settings.backends)}; start every rank with the same options"
            )
        name = f"{self.settings.backends[request.backend].name}, rank {request.rank}"
        environment = self.settings.worker_environment(request)
        worker = DriverProcess(name, self.settings.command(request), environment)
        self._workers.append(worker)
        return worker

    def close(self, *, failed: bool) -> None:
        for worker in self._workers:
            if failed:
                worker.kill()
            else:
                worker.quit()
        for worker in self._workers:
            worker.close()
        self._workers = []


class RemoteWorkers(RemotePlace):
    """Rank 0's handle of another rank's agent."""

    def start_worker(self, request: WorkerRequest, backend: str) -> Endpoint:
        worker = RemoteDriver(self, len(self._endpoints), f"{backend}, rank {request.rank} on {self.host}")
        self._endpoints.append(worker)
        self.send({"id": worker.number, "start": asdict(request)})
        return worker


def serve_workers(connection: LineConnection, place: LocalWorkers) -> bool:
    """`serve`, starting workers."""
    return serve(connection, lambda order: place.start(WorkerRequest(**order)))
