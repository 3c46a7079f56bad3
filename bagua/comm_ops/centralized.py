"""Centralized synchronous communication: every rank ends with the sum or the mean over all.

The mean is computed as torch's DDP does it, so that the results are the same bits: each rank's share is divided by the
number of ranks, then all are added.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.all_reduce import sum_over_ranks
from bagua.comm_ops.chunk_exchange import ChunkExchange
from bagua.engine.bucket import Bucket, PrescaledOp
from bagua.job import torch_internals
from bagua.kernels.argument_checks import HALF_DTYPES


class AllReduce(PrescaledOp):
    """Sum or mean of the bucket over the group, in one all-reduce."""

    inline = True

    def __init__(
        self, communicator: BaguaCommunicator, average: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._communicator = communicator
        self._options = dist.AllreduceOptions()
        if average and communicator.nranks() > 1:
            if _divides_exactly(communicator, device, dtype):
                self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
            else:
                self.prescale = 1.0 / communicator.nranks()

    def run(self, bucket: Bucket) -> dist.Work | None:
        if len(self._communicator.ranks) == 1:
            return None  # its own values are the sum
        # Not dist.all_reduce, whose checks and logging cost more than this once per bucket.
        work: dist.Work = self._communicator.torch_group.allreduce([bucket.flattened_tensor()], self._options)
        return work


class DirectAllReduce(PrescaledOp):
    """Sum or mean of the bucket over the communicator, where `sum_over_ranks` sends messages by itself."""

    inline = False

    def __init__(self, communicator: BaguaCommunicator, average: bool) -> None:
        self._communicator = communicator
        self.prescale = 1.0 / communicator.nranks() if average else None

    def run(self, bucket: Bucket) -> dist.Work | None:
        sum_over_ranks(bucket.flattened_tensor(), self._communicator)
        return None


class HierarchicalAllReduce:
    """Sum or mean of the bucket over the group, by way of one leader per node: a reduction within each node, an
    all-reduce among the leaders, a broadcast within each node. Between nodes travels what one rank per node has."""

    inline = False

    def __init__(self, group: BaguaProcessGroup, average: bool) -> None:
        self._ranks = group.size
        self._intra = group.get_intra_node_communicator()
        # Leaders only; for others it is no communicator.
        self._inter = group.get_inter_node_communicator() if self._intra.rank() == 0 else None
        self._average = average

    def run(self, bucket: Bucket) -> dist.Work | None:
        flat = bucket.flattened_tensor()
        if self._average:
            # Before any sum, as without a hierarchy: the mean over all ranks, also where nodes have different sizes.
            _divide(flat, self._ranks)
        leader = self._intra.ranks[0]
        if self._intra.nranks() > 1:
            dist.reduce(flat, leader, dist.ReduceOp.SUM, group=self._intra.torch_group)
        if self._inter is not None:
            sum_over_ranks(flat, self._inter)
        if self._intra.nranks() > 1:
            dist.broadcast(flat, leader, group=self._intra.torch_group)
        return None


class ScatterGatherAllReduce:
    """Sum or mean of the bucket over the communicator: all-to-all, a local sum, all-gather. The bucket's length is a
    multiple of the number of ranks."""

    inline = False

    def __init__(self, communicator: BaguaCommunicator, average: bool) -> None:
        self._communicator = communicator
        self._average = average

    def run(self, bucket: Bucket) -> dist.Work | None:
        flat = bucket.flattened_tensor()
        ranks = self._communicator.nranks()
        if flat.numel() % ranks:
            raise ValueError(
                f"bucket {bucket.name!r} has {flat.numel()} elements, which {ranks} ranks cannot share evenly; make it"
                f" with alignment={ranks}"
            )
        if self._average:
            _divide(flat, ranks)
        chunks = flat.view(ranks, -1)
        exchange = ChunkExchange(chunks, self._communicator)
        exchange.to_all(exchange.to_owners().sum(dim=0, dtype=flat.dtype))
        return None


def _divides_exactly(communicator: BaguaCommunicator, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the backend computes means, and as exactly as sums. NCCL multiplies by 1/n while it reads, which saves a
    pass; but it rounds 1/n to the dtype: of three ranks, all means in bfloat16 would be too large by 0.2 %."""
    if device.type != "cuda" or torch_internals.backend_name(communicator.torch_group, device) != "nccl":
        return False
    return dtype not in HALF_DTYPES or communicator.nranks().bit_count() == 1


def _divide(flat: Tensor, ranks: int) -> None:
    if ranks > 1:
        flat.mul_(1.0 / ranks)
