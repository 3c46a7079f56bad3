"""The sum over a communicator, in place, by way of whatever is fastest for it.

Large tensors on CPU go by messages from every rank to every other. gloo's all-reduce passes segments round a ring, each
only after the one before it has come, so that it waits for the network's delay tens of times; here every rank waits
twice, and for an answer before the first (docs/design/measurements.md). With x_i the values of rank i in n parts:

    to rank r, from each rank i:    x_i[r]
    on rank r:                      y = x_r[r] + x_(r+1)[r] + ... + x_(r-1)[r], from left to right
    to all, from rank r:            y

With more than DIRECT_RANKS ranks that would be many small messages. The ranks form rows of equal length then, and the
sum over a row becomes the sum over all, before it is sent, by the same steps among the ranks with the same position in
their rows. So a rank has 2 (row + column - 2) messages to send instead of 2 (n - 1), and waits six times for the delay
instead of three. If n has no divisors for that, gloo's all-reduce has to do.

All ranks end with the same bits. Slices of a part go their way by themselves: one is added while the next one comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives import byte_transport
from bagua.collectives.communicator import BaguaCommunicator, under_way
from bagua.kernels.scratch_memory import scratch

# Of all values. With less, the messages' own cost is above what they save.
DIRECT_BYTES = 1 << 20
# How many values are on their way at once: the scratch memory is as large, less the own part.
WINDOW_BYTES = 32 << 20
SLICE_BYTES = 2 << 20
# A small message takes some 0.13 ms of a CPU: of 32 ranks, each needs 8 ms for its 62.
DIRECT_RANKS = 32
# Of a rank in its row and its column. Beyond that the messages take longer than gloo's ring on a network without delay.
MOST_PEERS = 128


def goes_directly(values: Tensor, ranks: int) -> bool:
    """Whether `sum_over_ranks` sends messages: then it blocks, on CPU, until it is done."""
    return (
        ranks > 1
        and sum(_grid(ranks)) - 2 <= MOST_PEERS
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
        row, column = _row_and_column(communicator.rank(), ranks)
        memory = _memory(windows[0], len(row))
        part = windows[0][: min(memory.shape[1], SLICE_BYTES // values.itemsize)]
        memory_of_column = _memory(part, len(column))

        def sum_over_column(total: Tensor) -> None:
            if len(column) > 1:
                _sum_among(column, total, memory_of_column, communicator)

        with under_way(communicator, "all_reduce"):
            for window in windows:
                _sum_among(row, window, memory, communicator, sum_over_column)
    elif ranks > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM, group=communicator.torch_group)


def _grid(ranks: int) -> tuple[int, int]:
    """(ranks in a row, ranks in a column). All in one row if they are few or have no divisors."""
    if ranks <= DIRECT_RANKS:
        return ranks, 1
    column = max(one for one in range(1, math.isqrt(ranks) + 1) if ranks % one == 0)
    return ranks // column, column


def _row_and_column(rank: int, ranks: int) -> tuple[Sequence[int], Sequence[int]]:
    """Those of this rank. A row has ranks that follow each other: they are on one node, if any are."""
    length, _ = _grid(ranks)
    begin = rank - rank % length
    return range(begin, begin + length), range(rank % length, ranks, length)


def _memory(values: Tensor, members: int) -> Tensor:
    """For what comes from the other members: their versions of a part of `values`, the longest one."""
    return scratch((members - 1, -(-len(values) // members)), values.dtype, values.device)


def _sum_among(
    members: Sequence[int],
    values: Tensor,
    memory: Tensor,
    communicator: BaguaCommunicator,
    then: Callable[[Tensor], None] = lambda _: None,
) -> None:
    """
    Args:
        members: ranks of the communicator, this one among them.
        memory: `_memory` of values at least as long.
        then: is done with the sum of a slice of this rank's part, before it is sent.
    """
    slices = [_slices(part) for part in values.tensor_split(len(members))]
    own = members.index(communicator.rank())
    mine = slices[own]
    # In ring order from the next rank, so that ranks do not all send to the first one at once.
    positions = [(own + distance) % len(members) for distance in range(1, len(members))]
    theirs = [(members[position], slices[position]) for position in positions]
    peers = [peer for peer, _ in theirs]
    versions = [_slices(row[: sum(map(len, mine))]) for row in memory]
    # Receptions come first: gloo then uses both directions of a link at once. Between two ranks messages arrive in the
    # order in which they are started: versions, then sums. The sum of a slice is made of the version that is sent from
    # the same memory, so that it cannot come before that has left.
    arriving = [
        [byte_transport.start_receive(communicator, one, peer) for one in version]
        for peer, version in zip(peers, versions, strict=True)
    ]
    sums = [byte_transport.start_receive(communicator, one, peer) for peer, part in theirs for one in part]
    sent = [byte_transport.start_send(communicator, one, peer) for peer, part in theirs for one in part]
    for place, total in enumerate(mine):
        for works, version in zip(arriving, versions, strict=True):
            works[place].wait()
            total.add_(version[place])
        then(total)
        sent.extend(byte_transport.start_send(communicator, total, peer) for peer in peers)
    for work in (*sums, *sent):
        work.wait()


def _slices(part: Tensor) -> tuple[Tensor, ...]:
    return torch.split(part, SLICE_BYTES // part.itemsize) if part.numel() else ()
