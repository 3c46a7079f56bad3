"""Batch normalization whose statistics are those of all ranks' batches together.

Ioffe and Szegedy, Batch Normalization (2015), https://arxiv.org/abs/1502.03167, over the batches of several ranks. A
layer is used by one thread of each rank at a time.

Forward: each rank's mean, spread and count are all-gathered, and each rank combines them in the same order, so that all
have the same bits. Backward, on autograd's thread: two sums per channel are all-reduced, only if the input needs a
gradient; the gradients of weight and bias are those of the rank's own values, which data-parallel training sums up like
all others.

Layers of the same group share one group of their own, that is used for nothing else: gradients of buckets are
communicated by other threads meanwhile, and collectives of one group must have one order.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from bagua.collectives.process_group import BaguaProcessGroup, group_for, is_initialized, to_bagua_process_group
from bagua.contrib.sync_batchnorm_kernels import Kernels, Reduction, Statistics, kernels_for, statistics_dtype
from bagua.job.torch_internals import all_gather_flat, hide_from_compiler


class SyncBatchNorm(_BatchNorm):
    """
    In training the outputs, gradients and running statistics are those of one process with the batches of all ranks,
    which may be of different sizes, empty too. In evaluation, in a group of one rank, and where no process group is
    initialized, it is the batch normalization of torch, and communicates nothing. On CUDA and CPUs.

    All ranks of the group call it equally often and in the same order, and so they do in backward. Gradients of
    gradients are refused with a RuntimeError.

    Args:
        num_features: channels, dimension 1 of inputs of shape [batch, channels, ...] with two dimensions or more, in
            any floating-point dtype and memory format. The statistics are computed in float32, of float64 in that.
        eps: added to the variance.
        momentum: of the running statistics; None: their mean over all batches.
        affine: with weight and bias.
        track_running_stats: False: evaluation uses the statistics of its batch, on each rank its own.
        process_group: a Bagua or torch group of the ranks that share statistics; None: the default group at the time of
            the first forward pass.
        device: of the parameters and running statistics.
        dtype: of the parameters and running statistics.

    Raises:
        ValueError: in the forward pass: the input has another shape, or all ranks together have fewer than two values
            per channel.
        CollectiveError: communication failed; names the ranks that are gone.
        RuntimeError: this process is not in the group.
        TypeError: `process_group` is not a process group.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: BaguaProcessGroup | dist.ProcessGroup | None = None
    ) -> nn.Module:
        """
        Replaces every BatchNorm1d, 2d, 3d and torch.nn.SyncBatchNorm in `module`. The new layers have the parameters,
        buffers and hooks of the old ones, so optimizers and state dicts stay valid. Call it before `with_bagua`.

        Args:
            process_group: that of the new layers, and of those that are converted already.

        Returns:
            `module`, or its replacement if it is a layer itself.

        Raises:
            ValueError: a layer is of a class with a forward of its own, which would be lost, or is a lazy layer that
                does not know its channels yet. Nothing has been replaced.
        """
        new: dict[nn.Module, nn.Module] = {
            one: cls._like(one, name, process_group)
            for name, one in module.named_modules()
            if isinstance(one, _BatchNorm)
        }
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in new:
                    parent._modules[name] = new[child]
        return new.get(module, module)

    @classmethod
    def _like(cls, layer: _BatchNorm, name: str, process_group: BaguaProcessGroup | dist.ProcessGroup | None) -> Self:
        where = f"{name or 'the module'} is a {type(layer).__name__}"
        if isinstance(layer, LazyModuleMixin):
            raise ValueError(f"{where}, which does not know its channels yet.\nRun one forward pass before converting.")
        if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward, cls.forward):
            raise ValueError(
                f"{where}, which has a forward of its own that SyncBatchNorm would not run.\n"
                "Replace it by hand: SyncBatchNorm(num_features), followed by what else its forward does."
            )
        new = cls.__new__(cls)
        new.__dict__ = {**layer.__dict__, "process_group": process_group}
        return new

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that it has in torch
        """
        Args:
            input: [batch, num_features, ...].

        Returns:
            of the same shape, dtype and memory format.
        """
        self._check_input_dim(input)
        return self._in_training(input) if self.training else super().forward(input)

    def _in_training(self, x: Tensor) -> Tensor:
        group = self._group()
        if group is None:
            return super().forward(x)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tracked = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        output: Tensor = SyncBatchNormFunction.apply(x, self.weight, self.bias, *tracked, factor, self.eps, group)  # type: ignore[no-untyped-call]
        return output

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(
                f"SyncBatchNorm({self.num_features}) got an input of shape {list(input.shape)} and {input.dtype}.\n"
                f"It must be [batch, {self.num_features}, ...], of a floating-point dtype."
            )

    def _group(self) -> BaguaProcessGroup | None:
        """For the statistics. None if there is nobody to share them with. Collective, the first time for a group.

        Raises:
            RuntimeError: this rank is not in the process group.
        """
        if self.process_group is None and not is_initialized() and not dist.is_initialized():
            return None
        group = to_bagua_process_group(self.process_group)
        if not group.is_member:
            raise RuntimeError(
                f"SyncBatchNorm({self.num_features}) is in the forward pass of rank {dist.get_rank()}, which is not in"
                " its process group.\nGive each rank a group that it is a member of."
            )
        if group.size == 1:
            return None
        # Not in that group itself, where gradients of buckets are under way.
        return group_for("statistics of SyncBatchNorm", group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The copy shares statistics with the same ranks.
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


# It communicates and makes groups. torch.compiler.disable would import the compiler, which takes half a second.
hide_from_compiler(SyncBatchNorm._in_training)


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
