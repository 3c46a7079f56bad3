"""Averaging of parameters that goes on beside training: x += mean(copy) - copy.

A mean over the ranks takes time, in which parameters x are trained on. So the mean is that of copies, and what the
parameters are given is the difference between it and the copy: what training has added meanwhile stays.

BucketAverage is the arithmetic for the parameters of one bucket, for a thread that prepares what the training thread
applies (bagua.comm_ops.averaging_loop). AsyncModelAverage is the same as an operation of a bucket, in one piece.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.averaging_group import AveragingGroup
from bagua.engine.bucket import Bucket
from bagua.engine.bucket_memory import misfit

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which parameters of `dtype` are averaged: shorter ones than float32 in float32."""
    return _WIDE.get(dtype, dtype)


class BucketAverage:
    """What the parameters of one bucket contribute to means, and what they are owed from them.

    contribution c   the parameters when they were copied, plus every difference that was computed since
    difference d     the sum of the differences that the parameters have not been given yet

    Without training, x + d = c at all times: an exchange makes c the mean and adds mean - c to d. So a rank that makes
    no steps may contribute c again and again; nothing is counted twice, and nothing is lost.

    Args:
        bucket: which does not flatten. Its memory becomes the contribution's, if it is wide enough.
        counts: of each of its tensors, see bagua.comm_ops.shared_elements; None: of all, all elements.
    """

    def __init__(self, bucket: Bucket, counts: Sequence[Tensor | None] | None = None) -> None:
        flat = bucket.flattened_tensor()
        self._names = [record.name for record in bucket.records]
        self._dtype = flat.dtype
        self.contribution = flat if flat.dtype is wide(flat.dtype) and not bucket.flatten else flat.to(wide(flat.dtype))
        self.difference = torch.empty_like(self.contribution)
        self._contributions = _views_like(bucket.views, self.contribution)
        self._differences = _views_like(bucket.views, self.difference)
        # 0 where another parameter is given what both are owed, otherwise 1. None: nowhere.
        self._factors: Tensor | None = None
        if counts is not None and any(count is not None for count in counts):
            self._factors = torch.ones_like(self.contribution)
            for factors, count in zip(_views_like(bucket.views, self._factors), counts, strict=True):
                if count is not None:
                    factors.copy_(count)

    @torch.no_grad()
    def copy_from(self, parameters: Sequence[Tensor]) -> None:
        """c = x. Nothing is owed.

        Raises:
            RuntimeError: a parameter was converted or moved.
        """
        self._check(parameters)
        torch._foreach_copy_(self._contributions, list(parameters))

    @torch.no_grad()
    def exchange(self, sum_over_ranks: Callable[[Tensor], None], ranks: int, is_owed: bool, scratch: Tensor) -> None:
        """d += mean - c; c = mean. On CPU done on return, with CUDA on the current stream.

        Args:
            sum_over_ranks: in place, of a tensor as long as the contribution.
            is_owed: whether d counts; otherwise it begins at zero.
            scratch: at least as long as the contribution, of its dtype and device.
        """
        mean = scratch[: self.contribution.numel()]
        mean.copy_(self.contribution)
        sum_over_ranks(mean)
        mean.div_(ranks)
        difference = torch.sub(mean, self.contribution, out=self.contribution)
        if self._factors is not None:
            difference.mul_(self._factors)
        if is_owed:
            self.difference.add_(difference)
        else:
            self.difference.copy_(difference)
        self.contribution.copy_(mean)

    @torch.no_grad()
    def give(self, parameters: Sequence[Tensor]) -> None:
        """x += d. Nothing is owed any more. Raises as `copy_from`."""
        self._check(parameters)
        torch._foreach_add_(list(parameters), self._differences)

    @torch.no_grad()
    def give_mean(self, parameters: Sequence[Tensor]) -> None:
        """x = c: as `give` where x was not trained since it was copied, but the same bits on all ranks."""
        torch._foreach_copy_(list(parameters), self._contributions)

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """`stream` uses the memory: when it is freed, that must have ended."""
        for memory in (self.contribution, self.difference, self._factors):
            if memory is not None:
                memory.record_stream(stream)

    def _check(self, parameters: Sequence[Tensor]) -> None:
        device = self.contribution.device
        for name, parameter, mine in zip(self._names, parameters, self._contributions, strict=True):
            if parameter.dtype is not self._dtype or parameter.device != device or parameter.shape != mine.shape:
                expected = torch.empty(0, dtype=self._dtype, device=device)
                raise misfit(f"The parameter {name!r}", parameter, expected, mine.shape)


def _views_like(views: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    return [flat.as_strided(view.shape, view.stride(), view.storage_offset()) for view in views]


class AverageStatus(enum.IntEnum):
    """Of an AsyncModelAverage."""

    RUNNING = 0
    ABORTING = 1  # this rank has asked for the end; others have not
    STOPPED = 2  # all ranks have


class AsyncModelAverage:
    """The bucket's elements x, which may be changed meanwhile, get closer to their mean: copy = x; x += mean - copy.

    Whoever changes or uses the elements meanwhile does so between `lock_weight` and `unlock_weight`, on another thread
    than the one that runs the operation. The host waits for all ranks, with CUDA too.

    Args:
        communicator: the group's for the bucket's device; None: for none.
    """

    inline = False

    def __init__(self, group: BaguaProcessGroup, communicator: BaguaCommunicator | None = None) -> None:
        self._group = AveragingGroup(group, communicator=communicator)
        self._lock = threading.Lock()
        self._used: torch.cuda.Event | None = None  # by the one that locked last; guarded by the lock
        self._status = AverageStatus.RUNNING

    def run(self, bucket: Bucket) -> None:
        if self._status is AverageStatus.STOPPED:
            return
        (all_abort,) = self._group.agree([int(self._status is AverageStatus.ABORTING)])
        if all_abort:
            self._status = AverageStatus.STOPPED
            return
        flat = bucket.flattened_tensor()
        copy = flat.to(wide(flat.dtype), copy=True)
        difference = copy.clone()
        self._group.sum(difference)
        difference.div_(self._group.ranks).sub_(copy)
        self.lock_weight(flat.device)
        try:
            flat.add_(difference)
        finally:
            self.unlock_weight(flat.device)

    def lock_weight(self, device: torch.device | None = None) -> None:
        """Until `unlock_weight`, the operation does not change the elements: neither on the host nor, if `device` is a
        GPU, before what its current stream is given by then has ended."""
        self._lock.acquire()
        if self._used is not None:
            torch.cuda.current_stream(device or self._used.device).wait_event(self._used)

    def unlock_weight(self, device: torch.device | None = None) -> None:
        """Raises RuntimeError if it is not locked."""
        if device is not None and device.type == "cuda":
            self._used = torch.cuda.current_stream(device).record_event()
        self._lock.release()

    def abort(self) -> None:
        """This rank wants the operation to do nothing any more. It goes on until all ranks have asked for that."""
        if self._status is AverageStatus.RUNNING:
            self._status = AverageStatus.ABORTING

    def reset(self) -> None:
        """Take `abort` back. Every rank calls it."""
        self._status = AverageStatus.RUNNING

    def get_status(self) -> AverageStatus:
        """RUNNING, ABORTING or STOPPED."""
        return self._status
