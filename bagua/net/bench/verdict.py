"""How much faster one variant is than another, and whether the difference is more than noise.

All comparisons use the same rule. Ratios are computed within a round, so that drift of the machine cancels. The spread
of the ratios is the interval between two of the sorted values, because outliers are frequent and large. If the spread
includes 1, there is no difference.
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
# Of builds of the plugin. Of 40 judgements without a change (20 rows, time and CPU) one is then wrong in every 25 runs,
# and half of those say slower.
BUILDS_ERROR_CHANCE = 0.001


class Verdict(enum.Enum):
    """Whether the first of two values is less than the second one."""

    LESS = "less"
    SAME = "same"
    MORE = "more"
    TOO_FEW = "too few"


@dataclass(frozen=True)
class PairedRatio:
    """The ratio of two values, computed within each repetition. `low` and `high` are the spread; see `ratio_of`."""

    median: float
    low: float
    high: float
    repetitions: int = MIN_REPETITIONS

    def verdict(self, *, floor: float = 0.0) -> Verdict:
        """`floor`: relative differences up to this size count as none, even if they are steady."""
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
    """The median of the ratios with its spread: the narrowest interval between two of the sorted ratios that misses the
    true median with at most this probability. With a probability of 0, or with few ratios, it is the whole range."""
    ordered = sorted(ratios)
    skipped = ranks_outside(len(ordered), error_chance)
    return PairedRatio(statistics.median(ordered), ordered[skipped], ordered[-1 - skipped], len(ordered))


def paired_ratio(above: Sequence[float], below: Sequence[float], error_chance: float = 0.0) -> PairedRatio:
    """The ratio above[i] / below[i] of each repetition i."""
    return ratio_of([a / b for a, b in zip(above, below, strict=True)], error_chance)


def ranks_outside(count: int, error_chance: float) -> int:
    """The number of sorted values that the spread leaves out at each end. Each ratio is above or below the true median
    with equal probability, whatever the distribution."""
    outside = 0
    tail = 1  # ways in which at most `outside` of `count` are below
    while 2 * (tail + math.comb(count, outside + 1)) <= error_chance * 2**count:
        outside += 1
        tail += math.comb(count, outside)
    return outside


def least_repetitions(error_chance: float) -> int:
    """With fewer ratios, even the whole range misses the true median more often."""
    return max(MIN_REPETITIONS, math.ceil(1 - math.log2(error_chance)))
