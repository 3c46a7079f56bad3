"""What a model is worth on a split. All ranks together: each evaluates a part of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.convergence.replicas import put_back
from measure.convergence.sharding import evaluation_share
from measure.convergence.task import Split, Task

# At a time: what is between fits into the caches of a CPU, or nearly.
_TARGETS = 1 << 14


@dataclass(frozen=True)
class Worth:
    """loss: mean over all targets. accuracy: part of them that is right, 0..1; None where there are no classes."""

    loss: float
    accuracy: float | None


def _sums(task: Task, model: nn.Module, split: Split) -> Tensor:
    """[sum of losses, right targets, targets] in float64."""
    device = split.targets.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    batch = max(1, _TARGETS * len(split) // max(1, split.targets.numel()))
    with torch.no_grad():
        for begin in range(0, len(split), batch):
            part = split.take(torch.arange(begin, min(begin + batch, len(split)), device=device))
            outputs = model(part.inputs)
            count = part.targets.numel()
            sums[0] += task.loss(outputs, part.targets).double() * count
            sums[1] += task.right(outputs, part.targets)
            sums[2] += count
    return sums


def _worth(task: Task, sums: Tensor) -> Worth:
    loss, right, count = sums.tolist()
    return Worth(loss / count, right / count if task.classifies else None)


def evaluate(task: Task, judge: nn.Module, model: Tensor, split: Split) -> Worth:
    """Collective: every rank has the same `model` (see replicas.snapshot) and gets the same answer.

    Args:
        judge: a module of the task's that is wrapped by nothing; its parameters are overwritten.
    """
    put_back(model, judge)
    share = evaluation_share(len(split), dist.get_rank(), dist.get_world_size())
    mine = split.take(torch.arange(share.start, share.stop, device=split.targets.device))
    sums = _sums(task, judge, mine)
    dist.all_reduce(sums)
    return _worth(task, sums)


def evaluate_alone(task: Task, judge: nn.Module, model: Tensor, split: Split) -> Worth:
    """Not collective: this rank's own model on all of the split."""
    put_back(model, judge)
    return _worth(task, _sums(task, judge, split))


def mean_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    mean = float(total) / dist.get_world_size()
    return mean if math.isfinite(mean) else math.inf
