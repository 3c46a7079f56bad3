"""The two exchanges of an all-reduce in chunks: to a chunk's owner, every rank's version; to all, what it makes of it.

With CUDA both are queued on the current stream, on CPU they block. Where gloo carries much, its collectives give way to
point-to-point messages: theirs use one direction of a link after the other for much of the time, so that between two
hosts at 1 Gb/s an all-to-all or an all-gather takes 1.4 times as long. And a message of gloo's waits until it has heard
from the receiver: receptions of both exchanges are started with the first, so that this is waited for only once
(docs/design/measurements.md).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from bagua.collectives import byte_transport
from bagua.collectives.byte_transport import as_bytes
from bagua.collectives.communicator import BaguaCommunicator, under_way
from bagua.job.torch_internals import all_gather_flat
from bagua.kernels.scratch_memory import scratch_like

# Of all chunks together, on CPU. With less, the messages' own cost is above what they save.
DIRECT_BYTES = 1 << 20


class ChunkExchange:
    """`to_owners`, then `to_all`, each once and on every rank.

    Args:
        chunks: [ranks, ...], contiguous; of the same shape and dtype on every rank. What others own is sent by
            `to_owners`, and from then on overwritten with results; after `to_all` all are there.
        communicator: rank r owns row r. With a single chunk nothing is sent, and the versions are the chunk itself.
    """

    def __init__(self, chunks: Tensor, communicator: BaguaCommunicator) -> None:
        self._chunks = chunks
        self._communicator = communicator
        self._is_alone = len(chunks) == 1
        self._is_direct = chunks.device.type == "cpu" and chunks.nbytes >= DIRECT_BYTES
        self._results: list[dist.Work] = []  # on their way into `chunks`

    def to_owners(self) -> Tensor:
        """An all-to-all: rank r's row i goes to rank i, as its row r.

        Returns:
            of the shape of the chunks, scratch memory: all ranks' versions of this rank's chunk.
        """
        chunks, communicator = self._chunks, self._communicator
        if self._is_alone:
            return chunks
        received = scratch_like(chunks)
        if not self._is_direct:
            dist.all_to_all_single(as_bytes(received), as_bytes(chunks), group=communicator.torch_group)
            return received
        mine = communicator.rank()
        with under_way(communicator, "exchange"):
            # A peer's result is made of what this rank sends to it, so that it cannot come before that has left.
            arriving = self._start_receiving(received)
            self._results = self._start_receiving(chunks)
            sent = [byte_transport.start_send(communicator, chunks[peer], peer) for peer in communicator.peers()]
            received[mine].copy_(chunks[mine])
            for work in (*arriving, *sent):
                work.wait()
        return received

    def to_all(self, chunk: Tensor) -> None:
        """An all-gather: rank r's chunk becomes row r of the chunks on every rank.

        Args:
            chunk: [...], contiguous, apart from the chunks.
        """
        chunks, communicator = self._chunks, self._communicator
        if self._is_alone:
            chunks[0].copy_(chunk)
            return
        if not self._is_direct:
            all_gather_flat(as_bytes(chunks), as_bytes(chunk), group=communicator.torch_group)
            return
        with under_way(communicator, "exchange"):
            sent = [byte_transport.start_send(communicator, chunk, peer) for peer in communicator.peers()]
            chunks[communicator.rank()].copy_(chunk)
            results, self._results = self._results, []
            for work in (*results, *sent):
                work.wait()

    def _start_receiving(self, rows: Tensor) -> list[dist.Work]:
        communicator = self._communicator
        return [byte_transport.start_receive(communicator, rows[peer], peer) for peer in communicator.peers()]
