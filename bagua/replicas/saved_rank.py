"""Whether a state that differs by rank is loaded by the rank that saved it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_rank(state: Mapping[str, Any], rank: int, ranks: int, each: str) -> None:
    """
    Args:
        state: with `rank` and, where that matters, `ranks`. Earlier versions saved none: nothing is checked then.
        rank: this one's number among those that hold different states.
        ranks: how many there are.
        each: what each of them has of its own, for the message: "owes something else".

    Raises:
        ValueError: another rank has saved it.
    """
    saved = state.get("rank", rank), state.get("ranks", ranks)
    if saved != (rank, ranks):
        raise ValueError(
            f"The state is that of rank {saved[0]} of {saved[1]}, and this is rank {rank} of {ranks}. Each {each}.\n"
            "Save a state on every rank, and load on each what it has saved, or go on without a state."
        )
