"""Batch normalization over the batches of several ranks, for autograd.

Forward: each rank's mean, spread and count are all-gathered, and each rank combines them in the same order, so that all
have the same bits. Backward: two sums per channel are all-reduced, only if the input needs a gradient; the gradients of
weight and bias are those of the rank's own values, which data-parallel training sums up like all others.

Runs on the thread of forward and, backward, on autograd's. The group is used for nothing else: gradients of buckets are
communicated by other threads meanwhile, and collectives of one group must have one order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.job.torch_internals import all_gather_flat
from bagua.torch_api.contrib.sync_batchnorm_kernels import Kernels, Reduction, Statistics, kernels_for, statistics_dtype


class SyncBatchNormFunction(torch.autograd.Function):
    """`apply(x, weight, bias, running_mean, running_var, factor, eps, group)`: the normalized input.

    `group` has several ranks. ValueError on all of them if they have fewer than two values per channel in total.
    Cannot be differentiated twice: RuntimeError.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        factor: float,
        eps: float,
        group: BaguaProcessGroup,
    ) -> Tensor:
        x = _dense(x)
        kernels = kernels_for(x, eps)
        means, spreads, counts = _all_gather(_own_message(x, kernels), x, group)
        buffers = [buffer for buffer in (running_mean, running_var) if buffer is not None]
        moved = [buffer.to(means.dtype) for buffer in buffers]
        new_mean, new_var = moved or (None, None)
        of = kernels.combine(Statistics(means, spreads), counts, new_mean, new_var, factor)
        for buffer, new in zip(buffers, moved, strict=True):
            if new is not buffer:
                buffer.copy_(new)
        ctx.save_for_backward(x, weight, *of, counts)
        ctx.eps, ctx.group = eps, group
        return kernels.normalize(x, weight, bias, of) if x.numel() else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, spread, counts = ctx.saved_tensors
        of, kernels, needed = Statistics(mean, spread), kernels_for(x, ctx.eps), ctx.needs_input_grad[:3]
        dy = _dense(dy)
        own = kernels.reduce(dy, x, weight, of, needed) if x.numel() else _nothing(of, needed)
        gradient = None
        if needed[0]:
            sums = torch.stack([own.sum_dy, own.sum_dy_xmu])
            what = f"backward of SyncBatchNorm({len(mean)})"
            ctx.group.get_global_communicator().perform(what, x.device, dist.all_reduce, sums)
            whole = own._replace(sum_dy=sums[0], sum_dy_xmu=sums[1])
            gradient = torch.empty_like(x)
            if x.numel():
                gradient = kernels.input_gradient(dy, x, weight, of, whole, counts)
        parameters = [None if one is None or weight is None else one.to(weight.dtype) for one in (own.weight, own.bias)]
        return gradient, *parameters, None, None, None, None, None


def _own_message(x: Tensor, kernels: Kernels) -> Tensor:
    """Mean and spread of each channel, and the number of values of one."""
    channels, count = x.shape[1], _values(x)
    message = torch.zeros(2 * channels + 1, dtype=statistics_dtype(x), device=x.device)
    if count:
        own = kernels.local_statistics(x)
        message[:channels], message[channels:-1] = own
        message[-1:].fill_(count)
    else:
        message[channels:-1].fill_(1)  # of no weight, but finite in every formula
    return message


def _all_gather(message: Tensor, x: Tensor, group: BaguaProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """(means [ranks, channels], spreads [ranks, channels], counts [ranks]).

    Raises:
        ValueError: all ranks together have fewer than two values per channel.
    """
    channels = x.shape[1]
    everybody = message.new_empty(group.size * len(message))
    what = f"forward of SyncBatchNorm({channels})"
    group.get_global_communicator().perform(what, x.device, all_gather_flat, everybody, message)
    table = everybody.view(group.size, -1)
    counts = table[:, -1].contiguous()
    # Where there is one value in all, no rank has more than one. The others need not wait for the counts.
    if _values(x) <= 1 and (total := int(counts.sum())) < 2:
        raise ValueError(
            f"SyncBatchNorm({channels}) got {total} values per channel from all ranks together, in training at least 2"
            f" are needed.\nThe input of this rank is {list(x.shape)}.\nDrop batches that are that small"
            " (drop_last=True), or call eval()."
        )
    return table[:, :channels].contiguous(), table[:, channels:-1].contiguous(), counts


def _values(x: Tensor) -> int:
    """Per channel."""
    return x.shape[0] * math.prod(x.shape[2:])


def _nothing(of: Statistics, needed: tuple[bool, bool, bool]) -> Reduction:
    """Of a rank without values. Its parameters have gradients nevertheless: data-parallel training expects them."""
    zeros = torch.zeros_like(of.mean)
    return Reduction(
        zeros, zeros, torch.zeros_like(zeros) if needed[1] else None, torch.zeros_like(zeros) if needed[2] else None
    )


def _dense(x: Tensor) -> Tensor:
    """The kernels keep a channels_last layout, and take no gaps."""
    if x.is_contiguous(memory_format=torch.channels_last) or x.is_contiguous(memory_format=torch.channels_last_3d):
        return x
    return x.contiguous()
