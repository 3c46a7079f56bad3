"""Centralized synchronous communication in bytes: an all-reduce that sends what a codec (bagua.codecs) makes of it.

With C the codec's compression and D its inverse, x_i the bucket of rank i cut into n chunks:

    to rank r, from each rank i:   C(x_i[r])                            all-to-all
    on rank r:                     y[r] = C( (1/n) * sum_i D(C(x_i[r])) )       (no 1/n: the sum)
    to all, from rank r:           y[r]                                 all-gather
    on every rank:                 x[r] = D(y[r]) for all r

Every rank decodes the same bytes, its own chunk's too, so that all end with the same bits. One rank alone rounds in the
same way. A block of the codec that holds a value that is not finite ends as NaN, everywhere.

The operations are the engine's (bagua.engine.bucket): with CUDA they queue work on the current stream and allocate
what they need there, on CPU they block the thread that they run on. While a bucket runs, 2 + 1/n times its compressed
size is in use; buckets run one after the other, so that the largest counts.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.codecs import Codec, dtype_names, get_codec
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.all_reduce import sum_over_ranks
from bagua.comm_ops.chunk_exchange import ChunkExchange
from bagua.engine.bucket import Bucket, PrescaledOp
from bagua.kernels.scratch_memory import scratch

# What is compressed where nothing else is asked for.
DEFAULT_CODEC = "int8"


def compressed_alignment(group: BaguaProcessGroup, hierarchical: bool, codec: str | Codec = DEFAULT_CODEC) -> int:
    """The elements of which a bucket's length should be a multiple: every chunk has the same length and begins aligned,
    whether the ranks or, with `hierarchical`, the nodes share it out."""
    nodes = len(group.topology.nodes) if hierarchical else 1
    return math.lcm(group.size, nodes) * get_codec(codec).alignment


def idle_hierarchy(group: BaguaProcessGroup, hierarchical: bool, what: str) -> list[str]:
    """What to log where `hierarchical` keeps all communication within one node, in which nothing is compressed.

    Args:
        what: is compressed between nodes, in the plural.
    """
    if not hierarchical or group.size == 1 or not group.topology.is_one_node:
        return []
    why = f"compresses {what} between nodes, and there is one: they are sent uncompressed"
    return [f"hierarchical=True {why}. hierarchical=False compresses them between ranks"]


class CompressedAllReduce(PrescaledOp):
    """Sum or mean of the bucket over the group, sent as bytes.

    With `hierarchical` the ranks of a node reduce to their leader as they are, the leaders run the above among
    themselves, with one chunk per node, and broadcast what they got. The mean is that over all ranks, also where nodes
    have different sizes. If there is one node only, its ranks all-reduce, and each rounds the result.

    Args:
        group: this process is a member. With `hierarchical`, its ranks all make the operation, since the groups within
            and between nodes are made here, on first use.
        average: the mean; otherwise the sum.
        hierarchical: whether only one rank per node talks to other nodes.
        everybody: what all ranks exchange by, where no hierarchy is in between; None: the group's own communicator.
        codec: what is sent: a name of `bagua.codecs.codec_names()`, or a Codec. The same on all ranks.
    """

    inline = False
    # Whether every rank of a single node may round for itself: where rounding has no state.
    rounds_alike = True

    def __init__(
        self,
        group: BaguaProcessGroup,
        average: bool = True,
        hierarchical: bool = False,
        everybody: BaguaCommunicator | None = None,
        codec: str | Codec = DEFAULT_CODEC,
    ) -> None:
        self.codec = get_codec(codec)
        self.hierarchical = hierarchical
        # Before any sum, as without compression.
        self.prescale = 1.0 / group.size if hierarchical and average and group.size > 1 else None
        self._average = average and not hierarchical
        self.chunks = len(group.topology.nodes) if hierarchical else group.size
        # Who adds up without compression, and who exchanges bytes, in chunk order (of several nodes, the leaders).
        self._intra: BaguaCommunicator | None = None
        self._peers = everybody or group.get_global_communicator()
        if hierarchical:
            self._intra = self._peers
            if self.chunks > 1:
                self._intra, self._peers = group.get_intra_node_communicator(), group.get_inter_node_communicator()

    def check(self, flat: Tensor, what: str) -> None:
        """
        Raises:
            TypeError: a dtype that cannot be compressed.
            ValueError: a length that the chunks do not divide.
        """
        if flat.dtype not in self.codec.dtypes:
            compresses = dtype_names(self.codec.dtypes)
            raise TypeError(
                f"{what} is of {flat.dtype}, and {self.codec.name} compresses {compresses}; leave the compression out"
                " for it"
            )
        if flat.numel() % self.chunks:
            raise ValueError(
                f"{what} has {flat.numel()} elements, which {self.chunks} {'nodes' if self.hierarchical else 'ranks'}"
                f" cannot share evenly; make it with alignment={self.chunks * self.codec.alignment}"
            )

    def run(self, bucket: Bucket) -> None:
        flat = bucket.flattened_tensor()
        if flat.numel() % self.chunks:
            self.check(flat, f"bucket {bucket.name!r}")
        if bucket.padding_tensor is not None:
            # It shares a range with gradients, which an overflow made NaN, and nobody else writes it.
            bucket.padding_tensor.zero_()
        self.all_reduce(flat)

    def all_reduce(self, flat: Tensor) -> None:
        """What `run` does, in place: one-dimensional values that are prescaled already, and that `check` accepts."""
        if not flat.numel():
            return
        intra = self._intra
        if intra is None:
            self._exchange(flat)
            return
        if self.chunks == 1 and self.rounds_alike:
            # One node: all have the sum after a single step.
            sum_over_ranks(flat, intra)
            self._exchange(flat)
            return
        if intra.nranks() > 1:
            dist.reduce(flat, intra.ranks[0], dist.ReduceOp.SUM, group=intra.torch_group)
        if intra.rank() == 0:
            self._exchange(flat)
        if intra.nranks() > 1:
            dist.broadcast(flat, intra.ranks[0], group=intra.torch_group)

    def _exchange(self, flat: Tensor) -> None:
        """The four lines at the head of this file."""
        codec, chunk = self.codec, flat.numel() // self.chunks
        size = codec.compressed_bytes(chunk)
        outgoing = codec.compress(flat, self.chunks, scratch((self.chunks, size), torch.uint8, flat.device))
        mine = scratch((size,), torch.uint8, flat.device)
        exchange = ChunkExchange(outgoing, self._peers)
        codec.decompress_reduce_compress(exchange.to_owners(), chunk, self._average, mine)
        exchange.to_all(mine)
        codec.decompress(outgoing, flat)
