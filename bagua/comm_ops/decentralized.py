"""Decentralized synchronous communication: each rank's weights become a mean of its own and others'.

The mean goes into a tensor of its own, the peer weight, so that the weights can be used meanwhile: forward and backward
run while the exchange does. `copy_back_peer_weight` puts the mean in place.

all:        peer weight = mean of x over all ranks
shift_one:  peer weight = (x of this rank + x of its partner) / 2      (bagua.comm_ops.peer_selection)

Hierarchical: the mean within each node, an exchange among the nodes' leaders, a broadcast within each node. For "all"
nodes count by their ranks, so that it is the mean over all ranks; for "shift_one" each node counts as one. With
one node both are "all" without a hierarchy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.peer_selection import check_peer_selection
from bagua.comm_ops.weight_exchange import (
    MeanOfAll,
    MeanOfPairs,
    as_real,
    broadcast_from_leader,
    mean_on_leader,
    tell_autograd,
)
from bagua.engine.bucket import Bucket


class PeerWeightAverage:
    """
    Args:
        peer_weight: where the mean goes: 1-D, of the length, dtype and device of the bucket. It may be the memory of a
            bucket that does not flatten.
        hierarchical: within nodes first, so that only one rank per node talks to other nodes.
        peer_selection_mode: "all" or "shift_one".

    Attributes:
        exchanges: how many there have been, which decides about the next partner. May be set, alike on all ranks, while
            none is under way.

    Raises:
        ValueError: an unknown mode, or "shift_one" with an odd number of ranks (`hierarchical`: of nodes).
    """

    inline = False

    def __init__(
        self, group: BaguaProcessGroup, peer_weight: Tensor, hierarchical: bool, peer_selection_mode: str
    ) -> None:
        check_peer_selection(peer_selection_mode)
        nodes = group.topology.nodes if hierarchical else ()
        if len(nodes) == 1:
            hierarchical, nodes, peer_selection_mode = False, (), "all"  # the same mean, without a leader
        check_peer_selection(
            peer_selection_mode,
            len(nodes) if hierarchical else group.size,
            "nodes (hierarchical=True)" if hierarchical else "ranks",
        )
        self.exchanges = 0
        self._peer_weight = peer_weight
        self._intra = group.get_intra_node_communicator() if hierarchical else None
        self._mean: MeanOfAll | MeanOfPairs | None = None  # on those that talk to other nodes
        if self._intra is None or self._intra.rank() == 0:
            among = group.get_inter_node_communicator() if hierarchical else group.get_global_communicator()
            if peer_selection_mode == "shift_one":
                self._mean = MeanOfPairs(among)
            else:
                ranks_by_leader = {node[0]: len(node) for node in nodes}
                self._mean = MeanOfAll(among, [ranks_by_leader.get(rank, 1) / group.size for rank in among.ranks])

    def run(self, bucket: Bucket) -> None:
        flat, step = bucket.flattened_tensor(), self.exchanges
        self.exchanges += 1
        if flat.device.type == "cuda":
            # Whoever drops the module while an exchange is under way must not let others have its memory.
            for tensor in (flat, self._peer_weight):
                tensor.record_stream(torch.cuda.current_stream(flat.device))
        self._peer_weight.copy_(flat)  # nothing, where the bucket's memory is the peer weight's
        values = as_real(self._peer_weight)
        if not values.numel():
            return
        if self._intra is not None:
            mean = mean_on_leader(values, self._intra)
            if self._mean is not None and mean is not values:
                values.copy_(mean)
        if self._mean is not None:
            self._mean.mix(values, step)
        if self._intra is not None:
            broadcast_from_leader(values, self._intra)

    @torch.no_grad()
    def copy_back_peer_weight(self, bucket: Bucket) -> None:
        """Make the mean the weights. The exchange has been waited for; on the current stream.

        Raises:
            RuntimeError: they were converted or moved, and do not fit any more.
        """
        bucket.flattened_tensor().copy_(self._peer_weight)
        if bucket.flatten:
            tell_autograd(bucket)
        else:
            bucket.check_tensors()
            Bucket.copy_out(bucket)  # whatever the bucket does after communication, which leaves the weights alone
