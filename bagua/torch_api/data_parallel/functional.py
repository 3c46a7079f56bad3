"""Collectives that autograd goes through. Forward runs on the caller's thread, backward on autograd's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bagua.collectives.arguments import check_op
from bagua.collectives.collectives import allreduce_inplace
from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.process_group import BaguaProcessGroup, to_bagua_process_group
from bagua.collectives.reduce_op import ReduceOp
from bagua.engine.comm_thread import in_order

_SUPPORTED = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG)


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: BaguaProcessGroup | dist.ProcessGroup | BaguaCommunicator | None = None,
) -> torch.Tensor:
    """
    The reduction of the tensors of all ranks, of the same shape, as a new tensor.

    The backward pass makes the same reduction of the gradients. Of SUM and AVG that is the derivative of what all
    ranks compute from the result together; of MAX it is not, but what the original did.

    Args:
        tensor: any memory layout.
        op: SUM, MAX or AVG.
        group: its ranks; None: the default group. Processes that are no members get a copy of their tensor.

    Raises:
        ValueError: another operation.
    """
    operation = differentiable_op("all_reduce", op)
    communicator = group
    if not isinstance(communicator, BaguaCommunicator):
        communicator = to_bagua_process_group(communicator).get_global_communicator()
    result: torch.Tensor = _AllReduce.apply(tensor, operation, communicator)  # type: ignore[no-untyped-call]
    return result


def differentiable_op(what: str, op: ReduceOp | int | dist.ReduceOp.RedOpType) -> ReduceOp:
    """
    Args:
        what: takes the operation, for the error.

    Raises:
        ValueError: another operation than SUM, MAX or AVG, of Bagua or torch.distributed.
    """
    operation = check_op(what, op)
    if operation not in _SUPPORTED:
        raise ValueError(
            f"{what}: op is {operation.name}, and only {', '.join(one.name for one in _SUPPORTED)} have a backward "
            "pass; use bagua.torch_api.allreduce where no gradient is needed"
        )
    return operation


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: ReduceOp, communicator: BaguaCommunicator) -> torch.Tensor:
        ctx.op, ctx.communicator = op, communicator
        result = tensor.clone(memory_format=torch.contiguous_format)
        if communicator is not CommMember.NON_COMM_MEMBER:
            # Buckets may be under way, in a forward pass as well: that of a checkpoint.
            in_order(communicator.torch_group, result.device, lambda: allreduce_inplace(result, op, communicator))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # By the function itself, so that the gradient can be differentiated again.
        gradient: torch.Tensor = _AllReduce.apply(gradients[0], ctx.op, ctx.communicator)  # type: ignore[no-untyped-call]
        return gradient, None, None
