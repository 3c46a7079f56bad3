"""Gradient all-reduce as arguments of torch's DistributedDataParallel change it: order and sizes of buckets, the dtype
that travels, and communication hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.bucket import Bucket, PrescaledOp
from bagua.engine.bucket_plan import plan_buckets
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel.comm_hook import CommHook, CommHookOp


@dataclass(frozen=True, eq=False)
class AllReduceOptions:
    """
    Attributes:
        bucket_bytes: the sizes at which buckets are closed, in launch order; the last one counts for all that follow.
            Empty: those of the engine.
        delayed: parameters that come after `delayed_until` in launch order.
        reduce_dtype: of what travels; None: that of the parameters.
        comm_hook: communicates instead of the all-reduce.
    """

    bucket_bytes: Sequence[int] = ()
    delayed: Sequence[Tensor] = ()
    delayed_until: Tensor | None = None
    reduce_dtype: torch.dtype | None = None
    comm_hook: CommHook | None = field(default=None)

    @property
    def is_default(self) -> bool:
        """Whether nothing differs from the plain algorithm."""
        return not (self.bucket_bytes or self.delayed or self.reduce_dtype or self.comm_hook)


class TunedAllReduceAlgorithm(GradientAllReduceAlgorithm):
    """Gradient all-reduce with options of one wrapper."""

    weighs_batches = True

    def __init__(self, base: GradientAllReduceAlgorithm, options: AllReduceOptions) -> None:
        super().__init__(base.hierarchical, base.average)
        self.base = base
        self.options = options

    def with_hook(self, hook: CommHook) -> TunedAllReduceAlgorithm:
        """The same with a communication hook."""
        return TunedAllReduceAlgorithm(self.base, replace(self.options, comm_hook=hook))

    def shared_settings(self) -> Mapping[str, object]:
        options = self.options
        return {
            "hierarchical": self.hierarchical,
            "average": self.average,
            "bucket_cap_mb_list": list(options.bucket_bytes),
            "delayed parameters": len(options.delayed),
            "reduce_dtype": options.reduce_dtype,
        }

    def reify(self, process_group: BaguaProcessGroup) -> TunedAllReduceAlgorithmImpl:
        return TunedAllReduceAlgorithmImpl(process_group, self)


class TunedAllReduceAlgorithmImpl(GradientAllReduceAlgorithmImpl):
    """See TunedAllReduceAlgorithm."""

    def __init__(self, process_group: BaguaProcessGroup, algorithm: TunedAllReduceAlgorithm) -> None:
        super().__init__(process_group, algorithm.hierarchical, algorithm.average)
        self._options = algorithm.options

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        tensors = super().init_tensors(bagua_ddp)
        late = {id(one) for one in self._options.delayed}
        early = [one for one in tensors if id(one) not in late]
        delayed = [one for one in tensors if id(one) in late]
        ends = (index for index, one in enumerate(early) if one is self._options.delayed_until)
        end = next(ends, len(early) - 1) + 1
        return [*early[:end], *delayed, *early[end:]]

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> Sequence[BaguaBucket]:
        sizes = self._options.bucket_bytes
        if sizes:
            flat = list(chain.from_iterable(tensors))
            tensors = [[flat[index] for index in group] for group in plan_buckets(flat, sizes[-1], sizes)]
        return super().tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        options = self._options
        if options.comm_hook is not None:
            bucket.clear_ops()
            bucket.append_op(CommHookOp(options.comm_hook, weakref.ref(bagua_ddp)))
        elif options.reduce_dtype is not None and options.reduce_dtype != bucket.dtype:
            bucket.clear_ops()
            communicator = self.process_group.get_global_communicator()
            bucket.append_op(CastAllReduce(communicator, self.average, options.reduce_dtype))
        else:
            super().init_operations(bagua_ddp, bucket)


class CastAllReduce(PrescaledOp):
    """Sum or mean of the bucket over the communicator, which travels in another dtype."""

    inline = True

    def __init__(self, communicator: BaguaCommunicator, average: bool, dtype: torch.dtype) -> None:
        self._communicator = communicator
        self._dtype = dtype
        # Before the sum, which could be too large for the dtype.
        self.prescale = 1.0 / communicator.nranks() if average else None

    def run(self, bucket: Bucket) -> Any:
        """What was begun."""
        flat = bucket.flattened_tensor()
        cast = flat.to(self._dtype)
        work = dist.all_reduce(cast, group=self._communicator.torch_group, async_op=True)
        return _CastWork(work, cast, flat)


class _CastWork:
    def __init__(self, work: Any, cast: Tensor, flat: Tensor) -> None:
        self._work, self._cast, self._flat = work, cast, flat

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            self._flat.copy_(self._cast)
