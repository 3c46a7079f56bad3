"""What a rank does for `measure core`, `networks` and `nics`: see measure.rank. All algorithms take their turns in this
process, in one process group."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.core.catalogue import REFERENCE
from measure.core.models import ModelSize, build, example
from measure.core.turn import StepClock, Turn
from measure.core.wrapping import prepare as prepare_algorithms

_COMPRESSION = "bagua.kernels._minmax_uint8"


@dataclass(frozen=True)
class Difference:
    """Between two final models."""

    largest: float  # of all elements, absolute
    relative: float  # length of the difference over the length of the way from the start, over all parameters


def parameters_on_host(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


@dataclass(frozen=True)
class Reference:
    """DDP's training of one model: where it began and where it ended. Rank 0 keeps it, since all ranks have the same,
    which the fingerprints show."""

    start: list[Tensor]
    end: list[Tensor]

    def compare(self, model: nn.Module) -> Difference:
        """A value that is no number makes both figures infinite: it is equal to nothing."""
        largest = squared = way_squared = 0.0
        for begin, end, parameter in zip(self.start, self.end, model.parameters(), strict=True):
            gap = parameter.detach().to("cpu") - end
            if not bool(torch.isfinite(gap).all()):
                return Difference(float("inf"), float("inf"))
            largest = max(largest, float(gap.abs().max()))
            squared += float(torch.linalg.vector_norm(gap, dtype=torch.float64)) ** 2
            way_squared += float(torch.linalg.vector_norm(end - begin, dtype=torch.float64)) ** 2
        if squared == 0.0:
            return Difference(0.0, 0.0)
        return Difference(largest, (squared / way_squared) ** 0.5 if way_squared else float("inf"))


_references: dict[str, Reference] = {}  # by model; rank 0 only


def prepare(device: torch.device, algorithms: Sequence[str], deterministic: bool) -> dict[str, Any]:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # A source tree on PYTHONPATH has no compiled compression. Algorithms that compress on CPUs then take several times
    # as long as for users, and nothing else shows it.
    package = importlib.util.find_spec("bagua") if device.type == "cpu" else None
    lacks = package is not None and importlib.util.find_spec(_COMPRESSION) is None
    facts = {"python_compression": str(package.origin)} if lacks else {}
    return {"unavailable": prepare_algorithms(algorithms), **facts}


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
