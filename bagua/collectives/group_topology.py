"""Which ranks share a node, and what follows from that for a group: who is with us, and who leads each node.

Whoever needs the nodes of a group reads the places of its members. That waits for nothing but the members having got
there, and needs no collective, so the processes may ask at different times. Any thread may call this.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from bagua.job import torch_internals
from bagua.job.places import PLACE_KEY, Place


@dataclass(frozen=True)
class GroupTopology:
    """The nodes of a group: global ranks, each node in group order, nodes in the order of their first member."""

    nodes: tuple[tuple[int, ...], ...]

    def node_of(self, rank: int) -> tuple[int, ...]:
        return next(node for node in self.nodes if rank in node)

    @property
    def is_one_node(self) -> bool:
        return len(self.nodes) == 1

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first member of every node. So the rank 0 of an intra-node group always takes part between nodes."""
        return tuple(node[0] for node in self.nodes)


def topology_of(places: Mapping[int, Place]) -> GroupTopology:
    """
    The nodes of a group from the places of its members, global rank -> place, in group order. The first that all
    members can answer and that agrees with LOCAL_WORLD_SIZE holds: the number of the node; the first rank of the node,
    which is RANK - LOCAL_RANK where a launcher numbers node after node; the name of the host.

    Raises:
        ValueError: none of them agrees; names what the members said.
    """
    candidates: list[Mapping[int, object]] = []
    if all(place.node is not None for place in places.values()):
        candidates.append({rank: place.node for rank, place in places.items()})
    first_ranks = _first_ranks(places)
    if first_ranks is not None:
        candidates.append(first_ranks)
    candidates.append({rank: place.host for rank, place in places.items()})

    for keys in candidates:
        nodes: dict[object, list[int]] = {}
        for rank, key in keys.items():
            nodes.setdefault(key, []).append(rank)
        if all(_fits([places[rank] for rank in node]) for node in nodes.values()):
            return GroupTopology(tuple(map(tuple, nodes.values())))
    said = "; ".join(
        f"rank {rank}: node {place.node}, LOCAL_RANK {place.local_rank}, LOCAL_WORLD_SIZE {place.local_world_size}, "
        f"host {place.host}"
        for rank, place in places.items()
    )
    raise ValueError(
        f"cannot tell which ranks share a node, the launcher's variables contradict each other ({said}); set "
        "LOCAL_RANK and LOCAL_WORLD_SIZE, and GROUP_RANK or NODE_RANK, as torchrun does"
    )


def _first_ranks(places: Mapping[int, Place]) -> dict[int, int] | None:
    """Of each member's node, if the nodes have consecutive ranks: the ranges that follow from it must not overlap."""
    ends: dict[int, int] = {}
    result = {}
    for rank, place in places.items():
        if place.local_rank is None or place.local_world_size is None:
            return None
        first = result[rank] = rank - place.local_rank
        ends[first] = max(ends.get(first, first), first + place.local_world_size)
    ordered = sorted(ends)
    return result if all(ends[one] <= other for one, other in itertools.pairwise(ordered)) else None


def _fits(node: Sequence[Place]) -> bool:
    """Whether these may be (a part of) one node, going by what each says about its size and about itself."""
    sizes = {place.local_world_size for place in node}
    local_ranks = [place.local_rank for place in node if place.local_rank is not None]
    size = sizes.pop()
    if sizes:
        return False
    return (size is None or len(node) <= size) and len(local_ranks) == len(set(local_ranks))


def find_topology(ranks: Sequence[int]) -> GroupTopology:
    """
    Of the group of these global ranks. Waits until each has made a Bagua group.

    Raises:
        RuntimeError: a member did not publish its place within the store's timeout.
        ValueError: the places contradict each other.
    """
    store = torch_internals.default_store()
    keys = [PLACE_KEY.format(rank) for rank in ranks]
    try:
        texts = store.multi_get(keys)
    except dist.DistError as error:
        late = next((rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])), ranks[0])
        raise RuntimeError(
            f"rank {late} has not said on which node it runs; it has to call init_process_group of "
            f"bagua.torch_api, or make a Bagua group, as this process (pid {os.getpid()}) did"
        ) from error
    return topology_of({rank: Place.of_json(text) for rank, text in zip(ranks, texts, strict=True)})
