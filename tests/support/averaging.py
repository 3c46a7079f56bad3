"""A rank that averages its parameters, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import bagua.torch_api.tensor  # noqa: F401 - gives tensors their methods
from bagua.comm_ops.async_average import BucketAverage
from bagua.comm_ops.averaging_loop import AveragingLoop
from bagua.comm_ops.averaging_memory import Part
from bagua.engine.bucket import Bucket

DEADLINE_S = 60.0


class Rank:
    """A rank that trains: parameters in two parts, and its loop."""

    def __init__(
        self, ranks: Any, values: Sequence[float], interval_s: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> None:
        self.parameters: list[list[list[Tensor]]] = []
        parts = []
        for number, value in enumerate(values):
            tensors: list[Any] = [torch.full((2, 3), value, dtype=dtype), torch.full((), value, dtype=dtype)]
            for index, tensor in enumerate(tensors):
                tensor.ensure_bagua_tensor(f"{number}.{index}", "module")
            bucket = Bucket(tensors, str(number), flatten=False)
            self.parameters.append([bucket.tensors])
            parts.append(Part([BucketAverage(bucket)]))
        self.steps = [0] * len(values)
        self.ranks = ranks
        self.loop = AveragingLoop(parts, ranks, interval_s)

    def start(self) -> None:
        self.loop.start()

    def begin(self) -> None:
        self.loop.begin(self.parameters, self.steps)

    def step(self, amount: float, part: int = 0) -> int | None:
        """An optimizer's step of one part, and its safe point."""
        for tensor in self.parameters[part][0]:
            tensor.add_(amount)
        self.steps[part] += 1
        return self.safe_point(part)

    def safe_point(self, part: int = 0) -> int | None:
        return self.loop.safe_point(part, self.parameters[part], self.steps[part])

    def end(self) -> list[int]:
        return self.loop.end(self.parameters, self.steps, DEADLINE_S)

    def value(self, part: int = 0) -> float:
        values = {float(value) for tensor in self.parameters[part][0] for value in tensor.view(-1)}
        assert len(values) == 1, values
        return values.pop()
