"""From the ratios of the rounds to a verdict: what the rounds themselves say about how far chance goes.

A round is a fresh start of all processes, and a start has its luck: where buffers, ports and threads come to lie
shifts a ratio by some percent for as long as the processes live. So the rounds are the sample, and not the repetitions
within one. Their distribution has far outliers (a neighbour wakes up), so everything here is a rank and not a mean.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The spread holds the true median but for this chance. Of 40 judgements without a change (20 rows, time and CPU) one is
# then wrong in every 25 runs, and half of those say slower.
ERROR_CHANCE = 0.001
# Below this many rounds not even the lowest and the highest of them hold the median so surely.
MIN_ROUNDS = 11
# Changes up to this are not called, however steady: the same code at another place in memory can differ by as much.
FLOOR = 0.01


class Verdict(enum.Enum):
    LESS = "less"
    SAME = "same"
    MORE = "more"


@dataclass(frozen=True)
class Judgement:
    """Of tree over base; above 1 the tree takes more."""

    ratio: float  # the median round
    low: float
    high: float
    verdict: Verdict

    @property
    def resolution(self) -> float:
        """The smallest change that such a spread would have shown, as a share."""
        return max(self.high / self.ratio - 1, self.ratio / self.low - 1, FLOOR)

    @property
    def spread(self) -> tuple[float, float, float]:
        return self.ratio, self.low, self.high


def judge(ratios: Sequence[float]) -> Judgement:
    """ratios: one of each round, at least MIN_ROUNDS."""
    if len(ratios) < MIN_ROUNDS:
        raise ValueError(f"{len(ratios)} rounds are too few for a verdict; at least {MIN_ROUNDS}")
    median = statistics.median(ratios)
    skipped = ranks_outside(len(ratios))
    ordered = sorted(ratios)
    low, high = ordered[skipped], ordered[-1 - skipped]
    if low <= 1 <= high or abs(median - 1) <= FLOOR:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.MORE if median > 1 else Verdict.LESS
    return Judgement(median, low, high, verdict)


def ranks_outside(count: int) -> int:
    """How many values at each end the spread leaves out: as many as keep the chance that the true median lies outside
    below ERROR_CHANCE. Each round is above it or below with even chance, whatever the distribution."""
    outside = 0
    tail = 1  # ways in which at most `outside` of `count` rounds are below
    while 2 * (tail + math.comb(count, outside + 1)) <= ERROR_CHANCE * 2**count:
        outside += 1
        tail += math.comb(count, outside)
    return outside
