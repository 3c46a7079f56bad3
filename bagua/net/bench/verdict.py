"""How much faster one of two is than the other, and whether chance alone could have made the difference.

All comparisons judge by this one rule: ratios are taken within a round, so that a drift of the machine cancels; their
spread is made of ranks and not of means, because it has far outliers (a neighbour wakes up); and where the spread
straddles 1, nothing is called a difference.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The sizes that the closing block speaks of when they were measured; else the nearest end of the series.
LARGE_BYTES = 128 << 20
SMALL_BYTES = 1 << 10
# With fewer repetitions the smallest and the largest say nothing about the spread.
MIN_REPETITIONS = 3


class Verdict(enum.Enum):
    """Of a ratio: the first of two takes less, as much, or more."""

    LESS = "less"
    SAME = "same"
    MORE = "more"
    TOO_FEW = "too few"


@dataclass(frozen=True)
class PairedRatio:
    """A ratio of two, taken within each repetition. `low` and `high` are the spread, see `ratio_of`."""

    median: float
    low: float
    high: float
    repetitions: int = MIN_REPETITIONS

    def verdict(self, *, floor: float = 0.0) -> Verdict:
        """`floor`: differences up to this part are not called, however steady."""
        if self.repetitions < MIN_REPETITIONS:
            return Verdict.TOO_FEW
        if self.low <= 1 <= self.high or abs(self.median - 1) <= floor:
            return Verdict.SAME
        return Verdict.MORE if self.low > 1 else Verdict.LESS

    def __str__(self) -> str:
        """A verdict only where the repetitions carry one."""
        found = self.verdict()
        if found is Verdict.TOO_FEW:
            return f"too few iterations for a verdict ({self.repetitions} of {MIN_REPETITIONS} repetitions)"
        if found is Verdict.SAME and self.low < self.high:
            return f"no clear difference (spread {self.low:.2f}..{self.high:.2f}x)"
        return f"{self.median:.2f}x (spread {self.low:.2f}..{self.high:.2f})"


def ratio_of(ratios: Sequence[float], error_chance: float = 0.0) -> PairedRatio:
    """The spread is as narrow as this chance allows that the true median lies outside of it: between two of the ordered
    ratios. With a chance of 0, and with few ratios, it is from the smallest to the largest."""
    ordered = sorted(ratios)
    skipped = ranks_outside(len(ordered), error_chance)
    return PairedRatio(statistics.median(ordered), ordered[skipped], ordered[-1 - skipped], len(ordered))


def paired_ratio(above: Sequence[float], below: Sequence[float], error_chance: float = 0.0) -> PairedRatio:
    """Of above[i] / below[i] of each repetition i."""
    return ratio_of([a / b for a, b in zip(above, below, strict=True)], error_chance)


def ranks_outside(count: int, error_chance: float) -> int:
    """How many values at each end the spread leaves out. Each ratio is above the true median or below it with even
    chance, whatever the distribution."""
    outside = 0
    tail = 1  # ways in which at most `outside` of `count` are below
    while 2 * (tail + math.comb(count, outside + 1)) <= error_chance * 2**count:
        outside += 1
        tail += math.comb(count, outside)
    return outside


def least_repetitions(error_chance: float) -> int:
    """With fewer, not even the smallest and the largest hold the true median so surely."""
    return max(MIN_REPETITIONS, math.ceil(1 - math.log2(error_chance)))
