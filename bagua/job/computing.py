"""How long a step of this process computes, for whoever compares ranks that wait for each other.

Whoever trains a module says it (`tell`); one that waits for another rank asks that rank's process
(bagua.job.presence). Any thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

LEAST_STEPS = 200  # that a rank is compared by: what is slow for a while is not meant
_LEAST_RATIO = 1.1


class Computing(NamedTuple):
    """
    Attributes:
        steps: that are measured.
        step_s: what one takes typically, without what it waits for.
    """

    steps: int = 0
    step_s: float = 0.0


_source: Callable[[], Computing] = Computing


def tell(source: Callable[[], Computing]) -> None:
    """Say it by this function from now on, on any thread."""
    global _source
    _source = source


def own() -> Computing:
    """Of this process; without steps: nobody knows."""
    with contextlib.suppress(RuntimeError):  # a module that is not trained any more, or is wrapped at this moment
        return _source()
    return Computing()


def slower_by(other: Computing, mine: Computing) -> float | None:
    """How many times as long the other one computes; None: it is not slower, or not for so many steps."""
    if min(other.steps, mine.steps) < LEAST_STEPS or mine.step_s <= 0:
        return None
    ratio = other.step_s / mine.step_s
    return ratio if ratio >= _LEAST_RATIO else None


def slower_text(ratio: float) -> str:
    """After "rank 3 is"."""
    return f"{ratio:.1f} times slower at computing: see shares"
