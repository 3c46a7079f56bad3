"""Who exchanges weights with whom: pure functions of rank, number of ranks and step, so that all ranks choose alike."""

from __future__ import annotations

PEER_SELECTION_MODES = ("all", "shift_one")


def check_peer_selection(mode: str, ranks: int | None = None, what: str = "ranks") -> None:
    """
    Args:
        mode: one of PEER_SELECTION_MODES.
        ranks: how many exchange weights; None: not known yet.
        what: they are, for the message.

    Raises:
        ValueError: an unknown mode, or a number of ranks that cannot be paired.
    """
    if mode not in PEER_SELECTION_MODES:
        known = ", ".join(map(repr, PEER_SELECTION_MODES))
        raise ValueError(f"peer_selection_mode={mode!r} is unknown; it is one of {known}")
    if mode == "shift_one" and ranks is not None and ranks > 1 and ranks % 2:
        raise ValueError(
            f"peer_selection_mode='shift_one' with {ranks} {what}: exchanges are in pairs, which an odd number does not"
            f" allow.\nUse peer_selection_mode='all', or {ranks - 1} or {ranks + 1} {what}."
        )


def shift_one_partner(rank: int, ranks: int, step: int) -> int:
    """With whom `rank` exchanges in exchange number `step`, from 0.

    The ranks are two halves, and a partner is always of the other half: the next one with each step. So a step is a
    perfect matching, and each rank of one half meets each of the other within `ranks / 2` steps. One rank alone is its
    own partner.

    Raises:
        ValueError: an odd number of ranks above one, or a rank that there is not.
    """
    check_peer_selection("shift_one", ranks)
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} must be between 0 and {ranks - 1}")
    if ranks == 1:
        return rank
    half = ranks // 2
    if rank < half:
        return (step + rank) % half + half
    return (rank - half - step) % half


def ring_neighbours(rank: int, ranks: int) -> tuple[int, int]:
    """(left, right) of `rank` in a ring of `ranks`. Of two, both are the other one; one rank alone is its own
    neighbor."""
    return (rank - 1) % ranks, (rank + 1) % ranks
