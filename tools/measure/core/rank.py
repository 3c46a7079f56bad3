"""What a rank does for `measure core`, `networks` and `nics`: see measure.rank. All algorithms take their turns in this
process, in one process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
from measure.core.wrapping import prepare as prepare_algorithms

_references: dict[str, Reference] = {}  # by model; rank 0 only


def prepare(device: torch.device, algorithms: Sequence[str], deterministic: bool) -> dict[str, Any]:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    return {"unavailable": prepare_algorithms(algorithms), **compression_facts(device.type)}


def settle(device: torch.device, algorithm: str, steps: int, warmup: int, **size: Any) -> None:
    """Trains, and forgets it."""
    with Turn(algorithm, device) as turn:
        _wrap(turn, device, warmup, **size)
        turn.train(steps)


def turn(device: torch.device, algorithm: str, steps: int, warmup: int, **size: Any) -> dict[str, Any]:
    model = size["model"]
    keeps = dist.get_rank() == 0 and algorithm == REFERENCE and model not in _references
    difference = None
    with Turn(algorithm, device) as found:
        _wrap(found, device, warmup, **size)
        start = parameters_on_host(found.model) if keeps else []
        measured = found.measure(steps, warmup)
        found.finish()
        trained = found.trained()
        fingerprint = example().fingerprint(trained, device).tolist()
        if keeps:
            _references[model] = Reference(start, parameters_on_host(trained))
        elif model in _references:
            difference = asdict(_references[model].compare(trained))
        del trained
    return {**asdict(measured), "fingerprint": fingerprint, "difference": difference, "kept": found.kept()}


def all_reduce(device: torch.device, size_bytes: int, seconds: float) -> dict[str, float]:
    """Seconds of an all-reduce of float32: of as many as take about `seconds`, one after the other, after one that is
    checked.

    Raises:
        RuntimeError: a sum is wrong.
    """
    ranks = dist.get_world_size()
    buffer = torch.full((size_bytes // 4,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(buffer)
    if not bool((buffer == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"an all-reduce of {size_bytes} bytes has a wrong sum")
    buffer.zero_()
    once = torch.tensor([_seconds(device, buffer, 2)], device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    count = min(1000, max(2, round(seconds / once.item())))
    return {"seconds": _seconds(device, buffer, count)}


def _seconds(device: torch.device, buffer: torch.Tensor, count: int) -> float:
    clock = StepClock(device)
    clock.mark()
    for _ in range(count):
        dist.all_reduce(buffer)
    clock.mark()
    return clock.seconds()[0] / count


def _wrap(turn: Turn, device: torch.device, warmup: int, *, model: str, seed: int, **size: Any) -> None:
    size = {one.name: size[one.name] for one in dataclasses.fields(ModelSize)}
    turn.wrap(build(model, ModelSize(**size), device, seed=seed, rank=dist.get_rank()), warmup=warmup)
