"""How old the averages are that a rank's parameters are given, in its own steps: figures for users."""

from __future__ import annotations


class Staleness:
    """Steps of this rank's optimizer between a copy and the addition of its difference to the mean.

    Attributes:
        count: additions so far. Parameters of several optimizers count for each of them.
        last: of the last one.
        largest: of any.
        total: of all together.
    """

    def __init__(self) -> None:
        self.count = self.last = self.largest = self.total = 0

    def __repr__(self) -> str:
        return f"Staleness(count={self.count}, last={self.last}, largest={self.largest}, mean={self.mean:.2f})"

    @property
    def mean(self) -> float:
        """0 before the first."""
        return self.total / self.count if self.count else 0.0

    def note(self, steps: int) -> None:
        """One more addition."""
        self.count += 1
        self.last = steps
        self.largest = max(self.largest, steps)
        self.total += steps
