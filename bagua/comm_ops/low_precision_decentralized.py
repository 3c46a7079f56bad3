"""Decentralized communication of compressed differences, in a ring (DCD-PSGD, Tang et al. 2018).

Each rank keeps a copy of its weights as they were after the last exchange, W, and of those of its neighbors, L and R.
With x, the weights now:

    d = x + 1/3 L + 1/3 R - 5/3 W  =  (x - W) + 1/3 (L - W) + 1/3 (R - W)
    q = compress(d), to both neighbors; ql from the left one, qr from the right one
    L += decompress(ql);  R += decompress(qr);  W += decompress(q);  x = W

d is computed in the second form, which has small numbers only. A rank decompresses its own q as well, by the operation
with which its neighbors add it to their copies, so that these stay equal to the original to the bit.

Hierarchical: x is the mean within each node, its leader compares and exchanges, and the messages are broadcast within
the node, where each rank applies them: all ranks of a node have the same x, W, L and R.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bagua.codecs import Codec, get_codec
from bagua.collectives import byte_transport
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.compressed import DEFAULT_CODEC
from bagua.comm_ops.peer_selection import ring_neighbours
from bagua.comm_ops.weight_exchange import as_real, broadcast_from_leader, mean_on_leader
from bagua.engine.bucket import Bucket
from bagua.kernels.scratch_memory import scratch

# Elements of which the difference is computed at a time on CPU: what is between fits into the caches.
_PIECE = 1 << 15


class LowPrecisionRing:
    """
    Args:
        group: whose ranks (`hierarchical`: whose nodes) form the ring, in their order.
        weight, left_peer_weight, right_peer_weight: W, L and R: 1-D, of the length, dtype and device of the bucket. At
            the beginning W holds the bucket's weights, L and R those of the neighbors.
        hierarchical: within nodes first, so that only one rank per node talks to other nodes.
        take_weights: gives x, which is overwritten. None: x is the bucket's memory, before and after the exchange.
        codec: what is sent: a name of `bagua.codecs.codec_names()`, or a Codec. The same on all ranks. W, L and R do
            not depend on it: another one may go on with them.

    Attributes:
        neighborhood: the global ranks of L, W and R; of nodes, their leaders.
    """

    inline = False

    def __init__(
        self,
        group: BaguaProcessGroup,
        weight: Tensor,
        left_peer_weight: Tensor,
        right_peer_weight: Tensor,
        hierarchical: bool,
        take_weights: Callable[[], Tensor] | None = None,
        codec: str | Codec = DEFAULT_CODEC,
    ) -> None:
        self._codec = get_codec(codec)
        self._take_weights = take_weights
        self._weight = as_real(weight)
        self._left = as_real(left_peer_weight)
        self._right = as_real(right_peer_weight)
        self._intra = group.get_intra_node_communicator() if hierarchical else None
        self._talks = self._intra is None or self._intra.rank() == 0
        if self._intra is None:
            self._ring = group.get_global_communicator()
            members, rank = list(self._ring.ranks), self._ring.rank()
        else:
            members = sorted(group.topology.leaders)
            rank = members.index(self._intra.ranks[0])
            if self._talks:
                self._ring = group.get_inter_node_communicator()
        left, right = ring_neighbours(rank, len(members))
        self.neighborhood = [members[one] for one in (left, rank, right)]
        # Of two ranks each is the other's neighbor on both sides, and one message does; one alone talks to itself.
        self._peers = sorted({left, right} - {rank})
        # Where the messages of the neighbors are: behind the own one, in the order of the peers.
        self._from_left, self._from_right = (
            0 if peer == rank else 1 + self._peers.index(peer) for peer in (left, right)
        )

    def run(self, bucket: Bucket) -> None:
        weights = as_real(bucket.flattened_tensor() if self._take_weights is None else self._take_weights())
        if not weights.numel():
            return
        mean = weights if self._intra is None else mean_on_leader(weights, self._intra)
        size = self._codec.compressed_bytes(weights.numel())
        # On GPUs what it needs for a while is free again for the messages.
        difference = self._difference(mean) if self._talks else None
        messages = scratch((1 + len(self._peers), size), torch.uint8, weights.device)
        if difference is not None:
            self._codec.compress(difference, out=messages[:1])
            del difference
            own, *received = messages
            byte_transport.exchange(self._ring, self._peers, [own] * len(self._peers), received)
        if self._intra is not None:
            broadcast_from_leader(messages, self._intra)
        for place, replica in ((self._from_left, self._left), (self._from_right, self._right), (0, self._weight)):
            _add(self._codec, messages[place : place + 1], replica)
        if self._take_weights is None:
            weights.copy_(self._weight)

    def _difference(self, weights: Tensor) -> Tensor:
        """d, in float32."""
        tensors = (weights, self._weight, self._left, self._right)
        if weights.device.type != "cpu":
            return _difference(*tensors).float()
        result = scratch(weights.shape, torch.float32, weights.device)
        for part, *parts in zip(*(torch.split(one, _PIECE) for one in (result, *tensors)), strict=True):
            part.copy_(_difference(*parts))
        return result


def _difference(weights: Tensor, own: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """x, W, L and R -> d, in float32, or more if they have more."""
    wide = torch.promote_types(own.dtype, torch.float32)
    own = own.to(wide)
    difference = weights.to(wide) - own
    for neighbor in (left, right):
        difference.add_(neighbor.to(wide) - own, alpha=1 / 3)
    return difference


def _add(codec: Codec, message: Tensor, replica: Tensor) -> None:
    """The one operation by which a message is added, on the rank that made it and on those that got it."""
    if replica.dtype in codec.dtypes:
        codec.decompress(message, replica, accumulate=True)
    else:
        replica.add_(codec.decompress(message, scratch(replica.shape, torch.float32, replica.device)))
