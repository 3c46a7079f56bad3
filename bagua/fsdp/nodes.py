"""Over which nodes a module is sharded, and what of a collective leaves a node. The user's thread makes it; the threads
that communicate read it.

A ring crosses the border of a node once, however many ranks the node has. An exchange between all ranks crosses it once
for each of them: with eight ranks on every node, int8 gradients would be twice as many bytes as a ring of fp32 ones.
Where every node has as many ranks, gradients are therefore summed within the nodes first, and compressed between
them: the two hops of ZeRO++ (Wang et al., arXiv:2306.10209), without the rounding of its first one. An all-gather is a
ring anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.collectives.group_topology import topology_of
from bagua.collectives.process_group import create_member_group, from_torch_group
from bagua.job.places import Place


@dataclass(frozen=True)
class Hops:
    """
    Attributes:
        within: the ranks of this node.
        between: the ranks that have the same position on every node.
        order: int64 [ranks], on the device of the gradients: the positions in the whole group of those that are first
            on their node, in the order of their `between`, then of those that are second, and so on.
    """

    within: dist.ProcessGroup
    between: dist.ProcessGroup
    order: Tensor


class Nodes:
    """The nodes of one group.

    Args:
        nodes: global ranks, those of one node in the order of the group.
    """

    def __init__(self, group: dist.ProcessGroup, nodes: tuple[tuple[int, ...], ...]) -> None:
        self._group = group
        self.nodes = nodes
        self._own = next(node for node in nodes if dist.get_rank() in node)

    @classmethod
    def of(cls, group: dist.ProcessGroup, places: Mapping[int, Place]) -> Nodes:
        """
        Args:
            places: of at least the group's ranks.

        Raises:
            ValueError: they contradict each other.
        """
        return cls(group, topology_of({rank: places[rank] for rank in dist.get_process_group_ranks(group)}).nodes)

    @classmethod
    def unknown(cls, group: dist.ProcessGroup) -> Nodes:
        """Every rank is taken for a node."""
        return cls(group, tuple((rank,) for rank in dist.get_process_group_ranks(group)))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.nodes))

    @property
    def has_hops(self) -> bool:
        """Several nodes, and as many ranks, more than one, on each."""
        return len(self.nodes) > 1 and len(set(self.sizes)) == 1 and len(self._own) > 1

    def hops(self, device: torch.device) -> Hops | None:
        """The two hops, None without them. All ranks of the group call it, the first time.

        Raises:
            CollectiveError: a rank did not call within the group's timeout.
        """
        if not self.has_hops:
            return None
        known = _made.get(self._group)
        if known is None:
            known = _made[self._group] = self._make(device)
        return known

    def _make(self, device: torch.device) -> Hops:
        whole = from_torch_group(self._group)
        own = sorted(self._own)
        columns = [sorted(column) for column in zip(*map(sorted, self.nodes), strict=True)]
        within = create_member_group(whole, own)
        between = create_member_group(whole, columns[own.index(dist.get_rank())])
        ranks = dist.get_process_group_ranks(self._group)
        order = [ranks.index(rank) for column in columns for rank in column]
        return Hops(within, between, torch.tensor(order, device=device))

    def leaving_all_to_all(self, each: int) -> int:
        """The bytes that this rank sends to other nodes if it sends `each` to every other rank; in a group of one node,
        all that it sends."""
        others = self._group.size() - (len(self._own) if len(self.nodes) > 1 else 1)
        return others * each

    def leaving_ring(self, total: int) -> int:
        """This rank's part of what leaves its node if a ring of all ranks gathers or reduces `total` bytes; in a group
        of one node, all that it sends."""
        sent = total // self._group.size() * (self._group.size() - 1)
        return sent // len(self._own) if len(self.nodes) > 1 else sent


# The groups of the hops live as long as the group that they are of.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Hops] = weakref.WeakKeyDictionary()


class Traffic:
    """What one rank sends for one purpose: to other nodes, or in a job of one node, to other ranks. Written by the
    threads that communicate, forward's and autograd's, one at a time.

    Attributes:
        sent: bytes that were sent.
        saved: bytes that torch's own collective would have sent on top of these; negative where it would send less.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.saved = 0

    def count(self, sent: int, plain: int) -> None:
        """
        Args:
            sent: bytes that this rank has sent.
            plain: bytes that it would have sent without compression.
        """
        self.sent += sent
        self.saved += plain - sent

    def as_dict(self) -> dict[str, int]:
        return {"sent": self.sent, "saved": self.saved}
