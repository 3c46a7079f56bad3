"""Who exchanges weights with whom: the pairing of shift_one is a perfect matching at every step, and all meet."""

from __future__ import annotations

import pytest

from bagua.comm_ops.peer_selection import (
    PEER_SELECTION_MODES,
    check_peer_selection,
    ring_neighbours,
    shift_one_partner,
)


def _specified(rank: int, ranks: int, step: int) -> int:
    """The formula as it was written down for the old core."""
    if rank < ranks / 2:
        return ((step + rank) % ((ranks + 1) // 2)) + ranks // 2
    return (rank - ranks // 2 - step) % (ranks // 2)


@pytest.mark.parametrize("ranks", range(2, 65, 2))
def test_every_step_is_a_perfect_matching_and_the_halves_meet(ranks: int) -> None:
    half = ranks // 2
    met: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for step in range(2 * ranks + 1):
        partners = [shift_one_partner(rank, ranks, step) for rank in range(ranks)]
        assert sorted(partners) == list(range(ranks)), step
        for rank, partner in enumerate(partners):
            assert partners[partner] == rank != partner, (step, rank)
            assert partner == _specified(rank, ranks, step)
            met[rank].append(partner)
            assert step < half or set(met[rank][-half:]) == set(range(half, ranks) if rank < half else range(half))


def test_numbers_that_cannot_be_paired() -> None:
    assert [shift_one_partner(0, 1, step) for step in range(3)] == [0, 0, 0]
    check_peer_selection("shift_one", 1)
    for ranks in (3, 5, 63):
        with pytest.raises(ValueError, match=rf"(?s){ranks} nodes.*odd.*'all', or {ranks - 1} or {ranks + 1} nodes"):
            check_peer_selection("shift_one", ranks, "nodes")
        with pytest.raises(ValueError, match="odd"):
            shift_one_partner(0, ranks, 0)
        check_peer_selection("all", ranks)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"rank {rank} must be between 0 and 3"):
            shift_one_partner(rank, 4, 0)


@pytest.mark.parametrize("mode", ["", "ring", "ALL", "shift_two"])
def test_an_unknown_mode_is_refused_with_those_that_there_are(mode: str) -> None:
    with pytest.raises(ValueError, match="unknown") as caught:
        check_peer_selection(mode, 4)
    assert all(repr(known) in str(caught.value) for known in PEER_SELECTION_MODES)


@pytest.mark.parametrize("ranks", range(1, 65))
def test_neighbours_in_the_ring_know_each_other(ranks: int) -> None:
    for rank in range(ranks):
        left, right = ring_neighbours(rank, ranks)
        assert ring_neighbours(left, ranks)[1] == ring_neighbours(right, ranks)[0] == rank
        assert (left == rank) == (ranks == 1)
        assert (left == right) == (ranks <= 2)
