"""Ways in which ranks exchange weights, on which the decentralized operations are built.

Weights are not gradients: what rounding takes from them is gone. So tensors of two bytes per element travel as they
are, and are added in float32 and rounded once; replicas that are equal stay equal to the bit.

Functions and classes without threads of their own; they run where the operation runs, on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives import byte_transport
from bagua.collectives.byte_transport import as_bytes
from bagua.collectives.communicator import BaguaCommunicator
from bagua.comm_ops.all_reduce import sum_over_ranks
from bagua.comm_ops.chunk_exchange import ChunkExchange
from bagua.comm_ops.peer_selection import shift_one_partner
from bagua.engine.bucket import Bucket
from bagua.kernels.argument_checks import HALF_DTYPES
from bagua.kernels.scratch_memory import scratch, scratch_like


def as_real(flat: Tensor) -> Tensor:
    """A flat tensor without complex numbers: real and imaginary parts one after the other. Shares memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def tell_autograd(bucket: Bucket) -> None:
    """The parameters in the bucket, which flattens, were overwritten through its memory, which autograd does not see: a
    backward pass that would still need the old values has to fail."""
    for tensor in bucket.tensors:
        torch.autograd.graph.increment_version(tensor)


def broadcast_from_leader(values: Tensor, communicator: BaguaCommunicator) -> None:
    """`values` of the communicator's rank 0 on all of its ranks."""
    if communicator.nranks() > 1:
        dist.broadcast(as_bytes(values), communicator.ranks[0], group=communicator.torch_group)


def mean_on_leader(values: Tensor, communicator: BaguaCommunicator) -> Tensor:
    """The mean over the communicator, on its rank 0; of no use on others. In float32, or more if `values` have more.

    Args:
        values: real; left alone if they are of two bytes per element, and the mean is scratch memory; overwritten
            otherwise.
    """
    wide = scratch_like(values, torch.float32).copy_(values) if values.dtype in HALF_DTYPES else values
    if communicator.nranks() > 1:
        wide.mul_(1.0 / communicator.nranks())
        dist.reduce(wide, communicator.ranks[0], dist.ReduceOp.SUM, group=communicator.torch_group)
    return wide


class MeanOfAll:
    """The mean over a communicator, the same bits on all of its ranks.

    Args:
        shares: of each rank in the mean; they add up to 1.
    """

    def __init__(self, communicator: BaguaCommunicator, shares: Sequence[float]) -> None:
        self._communicator = communicator
        self._shares = list(shares)

    def mix(self, values: Tensor, step: int) -> None:
        """Overwrite `values`, real, with the mean. `step` makes no difference."""
        if self._communicator.nranks() == 1:
            return
        if values.dtype in HALF_DTYPES:
            self._mix_short(values)
            return
        values.mul_(self._shares[self._communicator.rank()])
        sum_over_ranks(values, self._communicator)

    def _mix_short(self, values: Tensor) -> None:
        """As many bytes as an all-reduce sends, which would round at each of its additions: each rank gets everybody's
        version of one part, adds them in float32, and gives the mean to all."""
        ranks = self._communicator.nranks()
        part = -(-values.numel() // ranks)
        padded = scratch((ranks * part,), values.dtype, values.device)
        padded[: values.numel()] = values
        padded[values.numel() :].zero_()
        exchange = ChunkExchange(padded.view(ranks, part), self._communicator)
        total = scratch((part,), torch.float32, values.device).zero_()
        for version, share in zip(exchange.to_owners(), self._shares, strict=True):
            total.add_(version, alpha=share)
        exchange.to_all(total.to(values.dtype))
        values.copy_(padded[: values.numel()])


class MeanOfPairs:
    """The mean with one partner at a time, the same bits on both sides."""

    def __init__(self, communicator: BaguaCommunicator) -> None:
        self._communicator = communicator

    def mix(self, values: Tensor, step: int) -> None:
        """Overwrite `values`, real, with (mine + partner's) / 2. The partner is that of exchange number `step`."""
        communicator = self._communicator
        if communicator.nranks() == 1:
            return
        partner = shift_one_partner(communicator.rank(), communicator.nranks(), step)
        theirs = scratch_like(values)
        byte_transport.exchange(communicator, [partner], [values], [theirs])
        if values.dtype in HALF_DTYPES:
            wide = scratch_like(values, torch.float32).copy_(values)
            values.copy_(wide.add_(theirs).mul_(0.5))
        else:
            values.add_(theirs).mul_(0.5)
