"""How much faster one backend is than another, as all closing blocks say it, and for which sizes they do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The sizes that the closing block speaks of when they were measured; else the nearest end of the series.
LARGE_BYTES = 128 << 20
SMALL_BYTES = 1 << 10
# With fewer repetitions the smallest and the largest say nothing about the spread.
MIN_REPETITIONS = 3


@dataclass(frozen=True)
class PairedRatio:
    """A ratio of two backends, taken within each repetition, so that drift cancels."""

    median: float
    low: float
    high: float
    repetitions: int = MIN_REPETITIONS

    def __str__(self) -> str:
        """A verdict only where the repetitions carry one."""
        if self.repetitions < MIN_REPETITIONS:
            return f"too few iterations for a verdict ({self.repetitions} of {MIN_REPETITIONS} repetitions)"
        if self.low <= 1 <= self.high and self.low < self.high:
            return f"no clear difference (spread {self.low:.2f}..{self.high:.2f}x)"
        return f"{self.median:.2f}x (spread {self.low:.2f}..{self.high:.2f})"


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> PairedRatio:
    """above[i] / below[i] of each repetition i."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return PairedRatio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))
