"""The arithmetic of synchronized batch normalization on one rank: torch's native kernels, by device.

Statistics are of at least float32, whatever the input is, and are a pair (mean, spread) of one number per channel. The
spread is what the device's kernels work with: 1 / sqrt(variance + eps) on CUDA, the variance on CPUs. Called within
autograd functions, where nothing is recorded.

On CPUs torch has no kernels for statistics of other ranks. Those of evaluation, whose statistics are given, do the same
work: their gradient is that of the batch without what flows through the statistics, which `input_gradient` adds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Of channels: shape [channels] each, or [ranks, channels]."""

    mean: Tensor
    spread: Tensor


class Reduction(NamedTuple):
    """What a rank's gradient of the output comes to, by channel.

    Attributes:
        sum_dy: of the gradient.
        sum_dy_xmu: of the gradient times the distance from the mean.
        weight, bias: their gradients; None where they need none.
        through_output: the gradient of the input if the statistics were constants. CPU only.
    """

    sum_dy: Tensor
    sum_dy_xmu: Tensor
    weight: Tensor | None
    bias: Tensor | None
    through_output: Tensor | None = None


class Kernels(ABC):
    """Inputs and gradients are [batch, channels, ...] with at least one element, dense in any memory format.

    Args:
        eps: added to the variance.
    """

    def __init__(self, eps: float) -> None:
        self.eps = eps

    @abstractmethod
    def local_statistics(self, x: Tensor) -> Statistics:
        """Of this rank's values."""

    @abstractmethod
    def combine(
        self,
        ranks: Statistics,
        counts: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        factor: float,
    ) -> Statistics:
        """The statistics of all ranks' values. Moves the running statistics, of the same dtype, by `factor` to them.

        Args:
            counts: [ranks], values per channel; 0 from ranks whose statistics are (0, 1).
        """

    @abstractmethod
    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, of: Statistics) -> Tensor:
        """The output, in the dtype of `x`."""

    @abstractmethod
    def reduce(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, of: Statistics, needed: tuple[bool, bool, bool]
    ) -> Reduction:
        """`needed`: the gradient of input, weight and bias."""

    @abstractmethod
    def input_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, of: Statistics, whole: Reduction, counts: Tensor
    ) -> Tensor:
        """`whole`: its sums are those of all ranks."""


class CudaKernels(Kernels):
    """Those of torch.nn.SyncBatchNorm."""

    def local_statistics(self, x: Tensor) -> Statistics:
        return Statistics(*torch.batch_norm_stats(x, self.eps))

    def combine(
        self,
        ranks: Statistics,
        counts: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        factor: float,
    ) -> Statistics:
        # The kernel divides by the number of values that it has seen so far. To leave out the ranks that have none, the
        # host would have to wait for their counts.
        positive = counts.clamp(min=1e-30)
        # Of its first argument it reads nothing but the type.
        return Statistics(
            *torch.batch_norm_gather_stats_with_counts(
                ranks.mean, ranks.mean, ranks.spread, running_mean, running_var, factor, self.eps, positive
            )
        )

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, of: Statistics) -> Tensor:
        return torch.batch_norm_elemt(x, _as(of, weight), _as(of, bias), of.mean, of.spread, self.eps)

    def reduce(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, of: Statistics, needed: tuple[bool, bool, bool]
    ) -> Reduction:
        return Reduction(*torch.batch_norm_backward_reduce(dy, x, of.mean, of.spread, _as(of, weight), *needed))

    def input_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, of: Statistics, whole: Reduction, counts: Tensor
    ) -> Tensor:
        return torch.batch_norm_backward_elemt(
            dy, x, of.mean, of.spread, _as(of, weight), whole.sum_dy, whole.sum_dy_xmu, counts.to(torch.int32)
        )


class CpuKernels(Kernels):
    """The spread is the variance."""

    def local_statistics(self, x: Tensor) -> Statistics:
        # With running statistics of float32, which are not used, it computes in float32 also for shorter inputs.
        unused = torch.zeros(2, x.shape[1], dtype=statistics_dtype(x), device=x.device)
        return Statistics(*torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))

    def combine(
        self,
        ranks: Statistics,
        counts: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        factor: float,
    ) -> Statistics:
        total = counts.sum()
        share = (counts / total).unsqueeze(1)
        mean = (share * ranks.mean).sum(dim=0)
        variance = (share * (ranks.spread + (ranks.mean - mean).square())).sum(dim=0)
        if running_mean is not None:
            running_mean.lerp_(mean, factor)
        if running_var is not None:
            running_var.lerp_(variance * (total / (total - 1)), factor)
        return Statistics(mean, variance)

    def normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, of: Statistics) -> Tensor:
        weight, bias = _as(of, weight), _as(of, bias)
        return torch.native_batch_norm(x, weight, bias, of.mean, of.spread, False, 0.0, self.eps)[0]

    def reduce(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, of: Statistics, needed: tuple[bool, bool, bool]
    ) -> Reduction:
        through_output, weight_gradient, sum_dy = torch.ops.aten.native_batch_norm_backward(
            dy, x, _as(of, weight), of.mean, of.spread, None, None, False, self.eps, [needed[0], True, True]
        )
        return Reduction(
            sum_dy,
            weight_gradient * (of.spread + self.eps).sqrt(),
            weight_gradient if needed[1] else None,
            sum_dy.clone() if needed[2] else None,
            through_output,
        )

    def input_gradient(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, of: Statistics, whole: Reduction, counts: Tensor
    ) -> Tensor:
        # -weight * invstd * (mean(dy) + (x - mean) * invstd^2 * mean(dy * (x - mean))), which is again a normalization.
        invstd = (of.spread + self.eps).rsqrt()
        scale = -invstd / counts.sum()
        if weight is not None:
            scale = scale * weight
        through_statistics = torch.native_batch_norm(
            x, scale * invstd * whole.sum_dy_xmu, scale * whole.sum_dy, of.mean, of.spread, False, 0.0, self.eps
        )[0]
        assert whole.through_output is not None
        return whole.through_output.add_(through_statistics)


def kernels_for(x: Tensor, eps: float) -> Kernels:
    """Those of the device of `x`."""
    return CudaKernels(eps) if x.is_cuda else CpuKernels(eps)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """float32 or longer."""
    return torch.promote_types(x.dtype, torch.float32)


def _as(of: Statistics, parameter: Tensor | None) -> Tensor | None:
    """In the dtype of the statistics: kernels take no other together with them."""
    return None if parameter is None else parameter.to(of.mean.dtype)
