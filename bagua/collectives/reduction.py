"""Reductions over a communicator: by the backend where it can, else the elements are brought together and folded here.

Flat, contiguous tensors that do not overlap. Runs on the caller's thread and stream, as byte_transport does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from bagua.collectives import byte_transport
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.reduce_op import ReduceOp, Reduction, divide_, fold, plan_reduction
from bagua.job import torch_internals


def plan(comm: BaguaCommunicator, tensor: torch.Tensor, op: ReduceOp) -> Reduction:
    """Raises TypeError: the reduction means nothing for the dtype."""
    return plan_reduction(tensor.dtype, op, torch_internals.backend_name(comm.torch_group, tensor.device))


def all_reduce(comm: BaguaCommunicator, tensor: torch.Tensor, reduction: Reduction) -> None:
    """In place."""
    tensor = tensor.view(reduction.dtype)
    if reduction.is_native:
        comm.perform("all_reduce", tensor, dist.all_reduce, tensor, reduction.op.torch_op)
        _finish(comm, tensor, reduction)
    else:
        everything = _room(comm, tensor)
        byte_transport.all_gather(comm, tensor, everything)
        tensor.copy_(fold(everything, reduction.op))


def reduce(comm: BaguaCommunicator, tensor: torch.Tensor, destination: int, reduction: Reduction) -> None:
    """In place on the destination; elsewhere the tensor keeps its values."""
    tensor = tensor.view(reduction.dtype)
    is_destination = comm.rank() == destination
    if reduction.is_native:
        # Backends may use the tensors of the others for sums in between.
        result = tensor if is_destination else tensor.clone()
        comm.perform("reduce", result, dist.reduce, result, comm.ranks[destination], reduction.op.torch_op)
        if is_destination:
            _finish(comm, result, reduction)
    else:
        everything = _room(comm, tensor) if is_destination else None
        byte_transport.gather(comm, tensor, everything, destination)
        if everything is not None:
            tensor.copy_(fold(everything, reduction.op))


def reduce_scatter(comm: BaguaCommunicator, source: torch.Tensor, target: torch.Tensor, reduction: Reduction) -> None:
    """`source` holds a part for every rank, `target` gets the reduced part of this one."""
    source, target = source.view(reduction.dtype), target.view(reduction.dtype)
    if reduction.is_native and torch_internals.backend_name(comm.torch_group, source.device) == "nccl":
        scatter = torch_internals.reduce_scatter_flat
        comm.perform("reduce_scatter", source, scatter, target, source, reduction.op.torch_op)
        _finish(comm, target, reduction)
    else:
        # No more bytes than a reduce-scatter needs, and every backend can do it.
        everything = _room(comm, target)
        byte_transport.all_to_all(comm, source, everything)
        target.copy_(fold(everything, ReduceOp.AVG if reduction.divides else reduction.op))


def _room(comm: BaguaCommunicator, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((comm.nranks(), tensor.numel()), dtype=tensor.dtype, device=tensor.device)


def _finish(comm: BaguaCommunicator, tensor: torch.Tensor, reduction: Reduction) -> None:
    if reduction.divides:
        divide_(tensor, comm.nranks())
