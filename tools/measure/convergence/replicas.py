"""Models as vectors: copied while training goes on, averaged over the ranks after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def snapshot(model: nn.Module) -> Tensor:
    """A copy of all parameters, one-dimensional. It changes nothing; sharded parameters are gathered, which is not
    counted as sent."""
    with torch.no_grad():
        return torch.cat([_whole(parameter.detach()).flatten() for parameter in model.parameters()])


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def put_back(vector: Tensor, model: nn.Module) -> None:
    """The opposite of `snapshot`: `model`'s parameters become `vector`."""
    with torch.no_grad():
        offset = 0
        for parameter in model.parameters():
            parameter.copy_(vector[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()


@dataclass(frozen=True)
class Averaged:
    """spread: how far apart the replicas were: the length of the largest difference of a replica from their mean, over
    the length of the mean. 0.0 means equal bit for bit."""

    mean: Tensor
    spread: float


def average(replica: Tensor) -> Averaged:
    """The mean over all ranks. Replicas that are equal bit for bit stay as they are: their mean would be rounded."""
    ranks = dist.get_world_size()
    low, high = replica.clone(), replica.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if torch.equal(low, high):
        return Averaged(replica, 0.0)
    total = replica.double()
    dist.all_reduce(total)
    mean = total / ranks
    away = torch.linalg.vector_norm(replica.double() - mean)
    dist.all_reduce(away, dist.ReduceOp.MAX)
    return Averaged(mean.to(replica.dtype), float(away / torch.linalg.vector_norm(mean)))
