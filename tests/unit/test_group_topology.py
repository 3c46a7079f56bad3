"""Which ranks share a node, from what their launchers say."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.collectives.group_topology import GroupTopology, Place, topology_of

NOBODY = Place(host="here", node=None, local_rank=None, local_world_size=None)


def launched(*sizes: int) -> dict[int, Place]:
    """One place per rank, numbered node after node, as torchrun does it."""
    places = [
        Place(host=f"host{node}", node=node, local_rank=local_rank, local_world_size=size)
        for node, size in enumerate(sizes)
        for local_rank in range(size)
    ]
    return dict(enumerate(places))


def without(places: dict[int, Place], **known: object) -> dict[int, Place]:
    return {rank: dataclasses.replace(place, **known) for rank, place in places.items()}  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_any_nodes_and_any_group(sizes: list[int], data: st.DataObject) -> None:
    """With the node's number or without, all hosts called alike or not, the whole world or a part of it."""
    places = launched(*sizes)
    members = data.draw(st.lists(st.sampled_from(sorted(places)), min_size=1, unique=True).map(sorted))
    expected = {}
    for rank in members:
        expected.setdefault(places[rank].node, []).append(rank)
    if data.draw(st.booleans()):
        places = without(places, node=None)
    if data.draw(st.booleans()):
        places = without(places, host="here")
    topology = topology_of({rank: places[rank] for rank in members})
    assert topology.nodes == tuple(map(tuple, expected.values()))
    assert topology.leaders == tuple(ranks[0] for ranks in expected.values())
    assert all(rank in topology.node_of(rank) for rank in members)


def test_without_a_launcher_the_hosts_tell() -> None:
    places = {0: NOBODY, 1: dataclasses.replace(NOBODY, host="there"), 2: NOBODY}
    assert topology_of(places).nodes == ((0, 2), (1,))


def test_nodes_emulated_inside_a_node() -> None:
    """One launcher says that all are on node 0, and LOCAL_WORLD_SIZE was made smaller: the latter wins."""
    places = {rank: Place("here", 0, rank % 2, 2) for rank in range(4)}
    assert topology_of(places).nodes == ((0, 1), (2, 3))


def test_ranks_dealt_out_in_turn() -> None:
    """The launcher numbers across the nodes; only the node's number tells then."""
    places = {rank: Place(f"host{rank % 2}", rank % 2, rank // 2, 2) for rank in range(4)}
    assert topology_of(places).nodes == ((0, 2), (1, 3))
    # Without it, consecutive ranks would make nodes that overlap, and the hosts tell.
    assert topology_of(without(places, node=None)).nodes == ((0, 2), (1, 3))


def test_order_of_the_group_is_kept() -> None:
    places = launched(2, 2)
    assert topology_of({rank: places[rank] for rank in (3, 0, 2, 1)}) == GroupTopology(((3, 2), (0, 1)))


def test_a_contradiction_names_what_was_said() -> None:
    places = {0: Place("a", None, 0, 1), 1: Place("a", None, 0, 2), 2: Place("a", None, 0, 2)}
    with pytest.raises(ValueError, match=r"rank 2: node None, LOCAL_RANK 0, LOCAL_WORLD_SIZE 2, host a\); set"):
        topology_of(without(places, local_world_size=2))
