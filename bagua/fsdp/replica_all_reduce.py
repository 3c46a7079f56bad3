"""A compressed all-reduce between replicas of a sharded model (hybrid sharding), for one FSDP module.

FSDP reduces gradients over the ranks that share a model; what is here then reduces this rank's shard of them over the
ranks that hold the same shard of other replicas. On a mesh with a dimension for replicas it stands in place of that
dimension's process group, on a mesh of shards alone it is FSDP's all-reduce hook. Each replica reduces a part of the
shard as bagua.fsdp.reduce_scatter does, compresses it and sends it to the others, so that all replicas have the same
bits.

Runs in autograd's thread, and on CUDA on FSDP's all-reduce stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec
from bagua.fsdp.collective_errors import named_errors
from bagua.fsdp.nodes import Traffic
from bagua.fsdp.reduce_scatter import factor_of, reduce_scatter
from bagua.fsdp.residual import Residual
from bagua.job.torch_internals import all_gather_flat


class ReplicaAllReduce:
    """
    Args:
        group: the ranks that hold the same shard.
        residual: error feedback of what the ranks send to be averaged, or None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        codec: Codec,
        traffic: Traffic,
        residual: Residual | None = None,
        title: str = "the model",
    ) -> None:
        self.group = group
        self._what = f"The all-reduce between replicas of {codec.name} gradients of {title}"
        self._codec = codec
        self._traffic = traffic
        self.residual = residual

    def reduce(self, reduce_output: Tensor, factor: float) -> None:
        """
        Args:
            reduce_output: [elements], a dtype of the codec; it becomes `factor` times the sum over the replicas.

        Raises:
            CollectiveError: a rank or the network failed.
        """
        if reduce_output.is_cuda:
            # Its memory belongs to the reduce-scatter stream, whose next user would not wait for this stream: torch
            # frees it here where gradients are reduced in another dtype than they are kept.
            reduce_output.record_stream(torch.cuda.current_stream(reduce_output.device))
        ranks, elements = self.group.size(), reduce_output.numel()
        if elements == 0:
            return
        if ranks == 1:
            reduce_output.mul_(factor)
            return
        flat = torch.nn.functional.pad(reduce_output, (0, -elements % (ranks * self._codec.alignment)))
        part = flat.new_empty(flat.numel() // ranks, dtype=torch.float32)
        with named_errors(self._what, self.group):
            sent = reduce_scatter(part, flat, self.group, self._codec, factor, self.residual)
            own = self._codec.compress(part)
            gathered = own.new_empty((ranks, own.shape[1]))
            all_gather_flat(gathered, own, group=self.group)
        self._codec.decompress(gathered, flat)
        reduce_output.copy_(flat[:elements])
        plain = 2 * (ranks - 1) * reduce_output.nbytes // ranks
        self._traffic.count(sent + (ranks - 1) * own.nbytes, plain)


class ReplicaHook:
    """FSDP's all-reduce hook on a mesh of shards alone.

    Args:
        divides_by_factor: whether `set_gradient_divide_factor` is in force: gradients of all ranks, those of other
            replicas included, are then added up and divided by that factor alone, as torch does on a mesh of replicas.
    """

    def __init__(self, reduction: ReplicaAllReduce, divides_by_factor: Callable[[], bool]) -> None:
        self._reduction = reduction
        self._divides_by_factor = divides_by_factor

    def __call__(self, reduce_output: Tensor) -> None:
        ranks = self._reduction.group.size()
        self._reduction.reduce(reduce_output, 1.0 if self._divides_by_factor() else 1.0 / ranks)


class ReplicaGroup:
    """What torch.distributed.all_reduce asks of a process group, where FSDP has one of replicas.

    It is equal to that one: after an error in a collective, torch looks the group up among those that it knows, and
    another one would hide the error.
    """

    def __init__(self, reduction: ReplicaAllReduce) -> None:
        self._reduction = reduction

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._reduction.group

    def __hash__(self) -> int:
        return hash(self._reduction.group)

    def size(self) -> int:
        return self._reduction.group.size()

    def rank(self) -> int:
        return self._reduction.group.rank()

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        """The one tensor becomes its reduction by AVG or SUM. On CUDA the result is there for the current stream, on
        CPUs it is there."""
        (tensor,) = tensors
        self._reduction.reduce(tensor, factor_of(options.reduceOp, self.size()))
