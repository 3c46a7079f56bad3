"""One rank: `python -m measure.core.worker`, see measure.ranks.rank_process. All algorithms take their turns in this
process, in one process group.

    -> {"op": "join", ..., "algorithms": ["torch-ddp", "async"], "device": "cpu", "seed": 1, "deterministic": false}
    <- {"event": "ready", ..., "unavailable": {"async": "..."}}         and see compression_code
    -> {"op": "settle", "model": "mlp", "algorithm": "torch-ddp", "length": 32, "batch_size": 32, "dtype": "float32",
        "steps": 5, "warmup": 5}
    <- {"event": "settle"}                              trained, and forgotten
    -> {"op": "turn", ..., "steps": 20, "warmup": 5}
    <- {"event": "turn", "step_seconds": [...], "fingerprint": [...], "difference": null, ...}
    -> {"op": "all_reduce", "size_bytes": 65536, "seconds": 0.4}
    <- {"event": "all_reduce", "seconds": 0.0004}       of one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from measure.core.agreement import Reference, parameters_on_host
from measure.core.catalogue import REFERENCE
from measure.core.compression_code import compression_facts
from measure.core.models import ModelSize, build, example
from measure.core.step_clock import StepClock
from measure.core.turn import Turn
from measure.core.wrapping import prepare
from measure.ranks.rank_process import run_rank


class Worker:
    """Its methods are the operations of the rank: each is run in the main thread, one at a time."""

    def __init__(self) -> None:
        self._seed = 0
        self._references: dict[str, Reference] = {}  # by model; rank 0 only

    def formed(self, join: Mapping[str, Any]) -> dict[str, Any]:
        torch.use_deterministic_algorithms(join["deterministic"], warn_only=True)
        self._seed = join["seed"]
        return {"unavailable": prepare(join["algorithms"]), **compression_facts(join["device"])}

    def settle(self, device: torch.device, command: Mapping[str, Any]) -> dict[str, Any]:
        with Turn(command["algorithm"], device) as turn:
            self._wrap(turn, device, command)
            turn.train(command["steps"])
        return {}

    def turn(self, device: torch.device, command: Mapping[str, Any]) -> dict[str, Any]:
        model, algorithm = command["model"], command["algorithm"]
        keeps = dist.get_rank() == 0 and algorithm == REFERENCE and model not in self._references
        difference = None
        with Turn(algorithm, device) as turn:
            self._wrap(turn, device, command)
            start = parameters_on_host(turn.model) if keeps else []
            measured = turn.measure(command["steps"], command["warmup"])
            turn.finish()
            trained = turn.trained()
            fingerprint = example().fingerprint(trained, device).tolist()
            if keeps:
                self._references[model] = Reference(start, parameters_on_host(trained))
            elif model in self._references:
                difference = asdict(self._references[model].compare(trained))
            del trained
        return {**asdict(measured), "fingerprint": fingerprint, "difference": difference, "kept": turn.kept()}

    def all_reduce(self, device: torch.device, command: Mapping[str, Any]) -> dict[str, Any]:
        """As many all-reduces of float32 as take about the wanted seconds, one after the other, after one that is
        checked.

        Raises:
            RuntimeError: a sum is wrong.
        """
        ranks = dist.get_world_size()
        buffer = torch.full((command["size_bytes"] // 4,), dist.get_rank() + 1.0, device=device)
        dist.all_reduce(buffer)
        if not bool((buffer == ranks * (ranks + 1) / 2).all()):
            raise RuntimeError(f"an all-reduce of {command['size_bytes']} bytes has a wrong sum")
        buffer.zero_()
        once = torch.tensor([self._seconds(device, buffer, 2)], device=device)
        dist.all_reduce(once, dist.ReduceOp.MAX)
        count = min(1000, max(2, round(command["seconds"] / once.item())))
        return {"seconds": self._seconds(device, buffer, count)}

    @staticmethod
    def _seconds(device: torch.device, buffer: torch.Tensor, count: int) -> float:
        clock = StepClock(device)
        clock.mark()
        for _ in range(count):
            dist.all_reduce(buffer)
        clock.mark()
        return clock.seconds()[0] / count

    def _wrap(self, turn: Turn, device: torch.device, command: Mapping[str, Any]) -> None:
        size = ModelSize(command["length"], command["batch_size"], command["dtype"])
        workload = build(command["model"], size, device, seed=self._seed, rank=dist.get_rank())
        turn.wrap(workload, warmup=command["warmup"])


if __name__ == "__main__":
    worker = Worker()
    operations = {"settle": worker.settle, "turn": worker.turn, "all_reduce": worker.all_reduce}
    run_rank(operations, worker.formed)
