"""The sum over a communicator, in place, by way of whatever is fastest for it.

Large tensors on CPU go by messages from every rank to every other. gloo's all-reduce passes segments round a ring, each
only after the one before it has come, so that it waits for the network's delay tens of times; here every rank waits
twice, and for an answer before the first (docs/design/measurements.md). With x_i the values of rank i in n parts:

    to rank r, from each rank i:    x_i[r]
    on rank r:                      y = x_r[r] + x_(r+1)[r] + ... + x_(r-1)[r], from left to right
    to all, from rank r:            y

All ranks end with the same bits. Slices of a part go their way by themselves: one is added while the next one comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bagua.collectives import byte_transport
from bagua.collectives.communicator import under_way
from bagua.engine.scratch_memory import scratch

if TYPE_CHECKING:
    from torch import Tensor

    from bagua.collectives.communicator import BaguaCommunicator

# Of all values. With less, the messages' own cost is above what they save.
DIRECT_BYTES = 1 << 20
# How many values are on their way at once: the scratch memory is as large, less the own part.
WINDOW_BYTES = 32 << 20
SLICE_BYTES = 2 << 20


def goes_directly(values: Tensor, ranks: int) -> bool:
    """Whether `sum_over_ranks` sends messages: then it blocks, on CPU, until it is done."""
    return (
        ranks > 1
        and values.device.type == "cpu"
        and (values.is_floating_point() or values.is_complex())
        and values.nbytes >= DIRECT_BYTES
    )


def sum_over_ranks(values: Tensor, communicator: BaguaCommunicator) -> None:
    """`values` become the sum over the communicator's ranks, with the same bits on all of them.

    On CPU done on return, with CUDA queued on the current stream.

    Args:
        values: 1-D, contiguous, as many on every rank and of one dtype.
    """
    ranks = communicator.nranks()
    if goes_directly(values, ranks):
        windows = torch.split(values, WINDOW_BYTES // values.itemsize)
        longest_part = -(-len(windows[0]) // ranks)
        versions = scratch((ranks - 1, longest_part), values.dtype, values.device)
        with under_way(communicator, "all_reduce"):
            for window in windows:
                _sum_directly(window, versions, communicator)
    elif ranks > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM, group=communicator.torch_group)


def _sum_directly(values: Tensor, memory: Tensor, communicator: BaguaCommunicator) -> None:
    """`memory`: [ranks - 1, at least as long as a part], for what comes from the peers."""
    slices = [_slices(part) for part in values.tensor_split(communicator.nranks())]
    mine, peers = slices[communicator.rank()], communicator.peers()
    versions = [_slices(row[: sum(map(len, mine))]) for row in memory]
    # Receptions come first: gloo then uses both directions of a link at once. Between two ranks messages arrive in the
    # order in which they are started: versions, then sums. The sum of a slice is made of the version that is sent from
    # the same memory, so that it cannot come before that has left.
    arriving = [
        [byte_transport.start_receive(communicator, one, peer) for one in version]
        for peer, version in zip(peers, versions, strict=True)
    ]
    sums = [byte_transport.start_receive(communicator, one, peer) for peer in peers for one in slices[peer]]
    sent = [byte_transport.start_send(communicator, one, peer) for peer in peers for one in slices[peer]]
    for place, total in enumerate(mine):
        for works, version in zip(arriving, versions, strict=True):
            works[place].wait()
            total.add_(version[place])
        sent.extend(byte_transport.start_send(communicator, total, peer) for peer in peers)
    for work in (*sums, *sent):
        work.wait()


def _slices(part: Tensor) -> tuple[Tensor, ...]:
    return torch.split(part, SLICE_BYTES // part.itemsize) if part.numel() else ()
