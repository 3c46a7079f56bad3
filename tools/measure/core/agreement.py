"""Whether algorithms trained the same model: final parameters compared with those of torch's DDP. Rank 0 keeps them,
since all ranks have the same, which the fingerprints show."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Difference:
    """Between two final models."""

    largest: float  # of all elements, absolute
    relative: float  # length of the difference over the length of the way from the start, over all parameters


def parameters_on_host(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


@dataclass(frozen=True)
class Reference:
    """DDP's training of one model: where it began and where it ended."""

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
