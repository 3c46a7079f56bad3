"""The two exchanges of an all-reduce in chunks: to a chunk's owner, every rank's version; to all, what it makes of it.

With CUDA both are queued on the current stream, on CPU they block. Where gloo carries much, its collectives give way to
point-to-point messages: theirs use one direction of a link after the other for much of the time, so that between two
hosts at 1 Gb/s an all-to-all or an all-gather takes 1.4 times as long (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bagua.collectives import byte_transport
from bagua.collectives.byte_transport import as_bytes
from bagua.collectives.torch_internals import all_gather_flat

if TYPE_CHECKING:
    from torch import Tensor

    from bagua.collectives.communicator import BaguaCommunicator

# Of all chunks together, on CPU. With less, the messages' own cost is above what they save.
DIRECT_BYTES = 1 << 20


def to_owners(versions: Tensor, communicator: BaguaCommunicator) -> Tensor:
    """An all-to-all: rank r's row i goes to rank i, as its row r.

    Args:
        versions: [ranks, ...], contiguous; of the same shape and dtype on every rank. Only read.

    Returns:
        of the same shape: all ranks' versions of this rank's chunk.
    """
    received = torch.empty_like(versions)
    if _is_direct(versions):
        mine, peers = communicator.rank(), _peers(communicator)
        byte_transport.exchange(
            communicator, peers, [versions[peer] for peer in peers], [received[peer] for peer in peers]
        )
        received[mine].copy_(versions[mine])
    else:
        dist.all_to_all_single(as_bytes(received), as_bytes(versions), group=communicator.torch_group)
    return received


def to_all(chunk: Tensor, out: Tensor, communicator: BaguaCommunicator) -> None:
    """An all-gather: rank r's chunk becomes row r of `out` on every rank.

    Args:
        chunk: [...], contiguous, apart from `out`.
        out: [ranks, ...], contiguous.
    """
    if _is_direct(out):
        peers = _peers(communicator)
        byte_transport.exchange(communicator, peers, [chunk] * len(peers), [out[peer] for peer in peers])
        out[communicator.rank()].copy_(chunk)
    else:
        all_gather_flat(as_bytes(out), as_bytes(chunk), group=communicator.torch_group)


def _is_direct(chunks: Tensor) -> bool:
    return chunks.device.type == "cpu" and chunks.nbytes >= DIRECT_BYTES


def _peers(communicator: BaguaCommunicator) -> list[int]:
    """The other ranks, each rank's first one another's: nobody is everybody's first."""
    ranks = communicator.nranks()
    return [(communicator.rank() + distance) % ranks for distance in range(1, ranks)]
