"""Collectives for Lightning modules, under the names of the old `pytorch_lightning.utilities.distributed`. On
torch.distributed alone: they need neither Lightning nor a strategy of ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.object_collectives import all_gather_object
from bagua.collectives.process_group import to_bagua_process_group
from bagua.job.torch_internals import all_gather_flat

__all__ = [
    "AllGatherGrad",
    "all_gather_ddp_if_available",
    "distributed_available",
    "gather_all_tensors",
    "init_dist_connection",
    "register_ddp_comm_hook",
    "sync_ddp",
    "sync_ddp_if_available",
]

_MEANS = ("avg", "mean")


def distributed_available() -> bool:
    """Whether this process has a process group."""
    return dist.is_available() and dist.is_initialized()


class AllGatherGrad(torch.autograd.Function):
    """An all-gather that gradients flow through: `AllGatherGrad.apply(tensor, group)`.

    The result is [ranks, *tensor.shape]. Its gradient is summed over the ranks, and each keeps its own slice.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        ctx.group = group
        own = tensor.contiguous()
        gathered = own.new_empty(dist.get_world_size(group), *own.shape)
        all_gather_flat(gathered.view(-1), own.view(-1), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def all_gather_ddp_if_available(
    tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False
) -> Tensor:
    """
    Args:
        tensor: of the same shape and dtype on all ranks; `gather_all_tensors` takes unequal ones.
        group: None: all ranks.
        sync_grads: gradients flow through, as in `AllGatherGrad`.

    Returns:
        [ranks, *tensor.shape]; the tensor itself without a process group.
    """
    if not distributed_available():
        return tensor
    if sync_grads:
        gathered: Tensor = AllGatherGrad.apply(tensor, group)  # type: ignore[no-untyped-call]
        return gathered
    with torch.no_grad():
        return AllGatherGrad.forward(_NoContext(), tensor, group)


class _NoContext:
    group: Any = None


def gather_all_tensors(result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Tensors of all ranks, whose shapes may differ. Every rank calls it.

    Args:
        result: with as many dimensions, and of the same dtype, on all ranks.
        group: None: all ranks.

    Returns:
        by rank, each in its own shape; [result] without a process group. Gradients do not flow.

    Raises:
        ValueError: dtypes or numbers of dimensions differ; on all ranks, and names them.
        CollectiveError: a rank is gone.
    """
    if not distributed_available():
        return [result]
    ours = to_bagua_process_group(group)
    described = (str(result.dtype), tuple(result.shape))
    communicator = ours.communicator_for("the tensor", [result])
    by_rank: list[tuple[str, tuple[int, ...]]] = all_gather_object(described, communicator)
    if len({(dtype, len(shape)) for dtype, shape in by_rank}) > 1:
        told = ", ".join(f"rank {rank} has {dtype} {list(shape)}" for rank, (dtype, shape) in enumerate(by_rank))
        raise ValueError(
            f"gather_all_tensors: the tensors have different dtypes or numbers of dimensions: {told}.\n"
            "Convert them to one dtype, and reshape them to as many dimensions, before the call."
        )
    shapes = [shape for _, shape in by_rank]
    largest = max(torch.Size(shape).numel() for shape in shapes)
    padded = result.new_zeros(largest)
    padded[: result.numel()] = result.detach().reshape(-1)
    gathered = result.new_empty(len(shapes), largest)
    all_gather_flat(gathered.view(-1), padded, group=ours.torch_group)
    return [row[: torch.Size(shape).numel()].view(shape) for row, shape in zip(gathered, shapes, strict=True)]


def sync_ddp(result: Tensor | complex, group: dist.ProcessGroup | None = None, reduce_op: Any = None) -> Tensor:
    """
    Args:
        result: of the same shape and dtype on all ranks; changed in place. Or a number.
        group: None: all ranks.
        reduce_op: "avg" or "mean" (both divide the sum by the number of ranks), "sum", "min", "max", "product", or one
            of torch.distributed.ReduceOp; None: the sum.

    Returns:
        `result`; a new tensor for a number, and for the mean of integers, which has a fraction.

    Raises:
        ValueError: an unknown operation.
    """
    divides = isinstance(reduce_op, str) and reduce_op.lower() in _MEANS
    operation = dist.ReduceOp.SUM if reduce_op is None or divides else reduce_op
    if isinstance(operation, str):
        operation = getattr(dist.ReduceOp, operation.upper(), None)
        if operation is None:
            raise ValueError(
                f"reduce_op={reduce_op!r} is unknown. Use 'mean', 'avg', 'sum', 'min', 'max' or 'product'."
            )
    ours = to_bagua_process_group(group)
    if not isinstance(result, Tensor):
        result = torch.tensor(result, device=ours.get_global_communicator().device)
    ours.communicator_for("the tensor", [result]).barrier()
    dist.all_reduce(result, op=operation, group=group)
    if not divides:
        return result
    ranks = dist.get_world_size(group)
    return result.div_(ranks) if result.is_floating_point() or result.is_complex() else result / ranks


def sync_ddp_if_available(
    result: Tensor | complex, group: dist.ProcessGroup | None = None, reduce_op: Any = None
) -> Tensor | complex:
    """`sync_ddp`; without a process group, `result` as it is."""
    return sync_ddp(result, group, reduce_op) if distributed_available() else result


def init_dist_connection(
    cluster_environment: Any,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Initialize torch.distributed as a cluster environment of Lightning says, and set MASTER_ADDR and MASTER_PORT to
    its address. Does nothing where torch.distributed is initialized.

    Args:
        cluster_environment: with `main_address`, `main_port`, `global_rank()` and `world_size()`.
        torch_distributed_backend: "gloo" or "nccl".
        global_rank: None: that of the environment.
        world_size: None: that of the environment.
        **kwargs: for torch.distributed.init_process_group.

    Raises:
        RuntimeError: this build of torch has no torch.distributed.
    """
    if not dist.is_available():
        raise RuntimeError("torch.distributed is not available in this build of torch: it cannot connect ranks.")
    if dist.is_initialized():
        return
    address, port = cluster_environment.main_address, cluster_environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = str(address), str(port)
    rank = cluster_environment.global_rank() if global_rank is None else global_rank
    ranks = cluster_environment.world_size() if world_size is None else world_size
    dist.init_process_group(
        torch_distributed_backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=ranks, **kwargs
    )


def register_ddp_comm_hook(
    model: torch.nn.parallel.DistributedDataParallel,
    ddp_comm_state: object = None,
    ddp_comm_hook: Callable[..., Any] | None = None,
    ddp_comm_wrapper: Callable[..., Any] | None = None,
    *,
    state: object = None,
) -> None:
    """Register a communication hook with torch's wrapper: torch's (fp16_compress_hook, powerSGD_hook, post-local SGD),
    or ours (bagua.comm_hooks).

    Args:
        model: torch's wrapper.
        ddp_comm_state: passed to the hook; None where it has no state.
        ddp_comm_hook: None: nothing is registered.
        ddp_comm_wrapper: of the hook, such as torch's fp16_compress_wrapper.
        state: another name of `ddp_comm_state`, which an example of the old documentation has.

    Raises:
        TypeError: both `ddp_comm_state` and `state` are given.
    """
    if ddp_comm_state is not None and state is not None:
        raise TypeError("register_ddp_comm_hook: give ddp_comm_state or state, which are the same, and not both")
    if ddp_comm_hook is None:
        return
    hook = ddp_comm_hook if ddp_comm_wrapper is None else ddp_comm_wrapper(ddp_comm_hook)
    model.register_comm_hook(state if ddp_comm_state is None else ddp_comm_state, hook)
