"""One rank of one backend: `python -m bagua.net.bench.nccl_ab.rank`, see bagua.net.bench.rank_process. Lives for the
whole run, because NCCL reads its environment once per process; sleeps between commands.

    -> {"op": "join", ..., "dtype": "bfloat16"}
    -> {"op": "verify", "collective": "all_reduce", "bytes": 1024, "salt": 1}
    <- {"event": "verify", "wrong_elements": 0, "first_wrong": null}
    -> {"op": "time", "collective": "all_reduce", "bytes": 1024, "iterations": 100, "warmup": 10, "single": 50}
    <- {"event": "time", "seconds": 0.0021, "single_seconds": [...], "cpu_seconds": 0.003}
    -> {"op": "memory"}
    <- {"event": "memory", "free_bytes": 149430468608}    what this rank could allocate now
    -> {"op": "proof"}
    <- {"event": "proof", "network": "BaguaNet", "table": "v11", ...}       read from this process's NCCL log
    -> {"op": "traffic"}
    <- {"event": "traffic", "interface": "eth0", ...}     of this host in the busiest `time`, see bench.traffic.Traffic
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua.net.bench.nccl_log import read_proof_file
from bagua.net.bench.rank_process import run_rank
from bagua.net.bench.traffic import NO_TRAFFIC, TrafficMeter, link_speed

if TYPE_CHECKING:
    from bagua.net.bench.nccl_ab.gpu_collectives import CollectiveRunner


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class NcclRank:
    """Its methods are the operations of the rank."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._cuda = False
        self._busiest = NO_TRAFFIC
        self._runner: CollectiveRunner

    def formed(self, device: Any, join: Mapping[str, Any]) -> dict[str, Any]:
        self._torch = torch = importlib.import_module("torch")
        distributed = importlib.import_module("torch.distributed")
        from bagua.net.bench.nccl_ab.gpu_collectives import CollectiveRunner

        torch.set_num_threads(1)
        self._cuda = device.type == "cuda"
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        self._runner = CollectiveRunner(rank, ranks, device, getattr(torch, join["dtype"]))
        self._synchronize()
        return {}

    def _synchronize(self) -> None:
        if not self._cuda:
            return
        # A blocking event sleeps; torch.cuda.synchronize() spins, which would be counted as the network's CPU time.
        event = self._torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()

    def memory(self, _: Any, _command: Mapping[str, Any]) -> dict[str, Any]:
        return {"free_bytes": self._runner.free_bytes()}

    def proof(self, _: Any, _command: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(read_proof_file(Path(os.environ["NCCL_DEBUG_FILE"])))

    def verify(self, _: Any, command: Mapping[str, Any]) -> dict[str, Any]:
        collective, size_bytes = command["collective"], command["bytes"]
        with self._runner.holding(collective, size_bytes):
            outcome = self._runner.verify(collective, size_bytes, command["salt"])
            self._synchronize()
        return asdict(outcome)

    def time(self, _: Any, command: Mapping[str, Any]) -> dict[str, Any]:
        with self._runner.holding(command["collective"], command["bytes"]):
            launch = self._runner.launch(command["collective"])
            for _ in range(command["warmup"]):
                launch()
            self._synchronize()
            # The faster backend's turn is shorter than the second that the slower one may take.
            meter = TrafficMeter(time.monotonic(), window_s=0.5)
            cpu_before = _cpu_seconds()
            seconds = self._time_batch(launch, command["iterations"])
            cpu_seconds = _cpu_seconds() - cpu_before
            meter.sample(time.monotonic())
            moved = meter.result(speed=lambda _: None)
            self._busiest = max(self._busiest, moved, key=lambda one: (one.peak_bytes_per_s, one.nbytes))
            single_seconds = []
            for _ in range(command["single"]):
                began = time.perf_counter()
                launch()
                if self._cuda:
                    # Spinning: the wake-up of a blocking event would be part of every single latency.
                    self._torch.cuda.synchronize()
                single_seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "single_seconds": single_seconds, "cpu_seconds": cpu_seconds}

    def traffic(self, _: Any, _command: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(replace(self._busiest, speed_bytes_per_s=link_speed(self._busiest.interface)))

    def _time_batch(self, launch: Any, iterations: int) -> float:
        """Seconds of all iterations: on a GPU between two events on the stream, as nccl-tests measures."""
        if not self._cuda:
            began = time.perf_counter()
            for _ in range(iterations):
                launch()
            return time.perf_counter() - began
        event = self._torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True, blocking=True)
        start.record()
        for _ in range(iterations):
            launch()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    _rank = NcclRank()
    _operations = (_rank.verify, _rank.time, _rank.memory, _rank.proof, _rank.traffic)
    run_rank({one.__name__: one for one in _operations}, _rank.formed)
