"""Which size of buckets makes steps fastest: the search, without anything that is measured or changed.

Settings take turns of a few steps. In each repetition all settings that are left have one turn, in another order each
time, so that whatever slows the machine down for a while does so for all. After some repetitions the slower half is
dropped; the default stays. The last ones compare the best setting with the default alone, in pairs. It is chosen if it
is faster in the median of the pairs by MIN_GAIN, and otherwise the default is. Nothing here knows about ranks: they are
given the same times, and so come to the same decisions. (Successive halving: Jamieson and Talwalkar, 2016,
https://arxiv.org/abs/1502.07943.)
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_GAIN = 0.02
FINAL_REPETITIONS = 7
REPETITIONS_BEFORE_HALVING = 2
_MIB = 1 << 20
_SIZES = (1, 2, 5, 10, 25, 50, 100, 200)  # MiB


@dataclass(frozen=True)
class Setting:
    """Sizes in bytes at which buckets, and the first one, are closed. None: the device's default, and as the others."""

    bucket_bytes: int | None
    first_bucket_bytes: int | None

    def __str__(self) -> str:
        if self.bucket_bytes is None:
            return "the default buckets"
        first = "" if self.first_bucket_bytes is None else f", the first of {self.first_bucket_bytes / _MIB:g} MiB"
        return f"buckets of {self.bucket_bytes / _MIB:g} MiB{first}"


def settings_for(nbytes: int, default: Setting) -> list[Setting]:
    """The default, and what else may pay.

    Args:
        nbytes: of all tensors together.
    """
    sizes = [size * _MIB for size in _SIZES if size * _MIB < nbytes]
    sizes.append(-(-nbytes // _MIB) * _MIB)  # one bucket
    found = [default]
    for size in sizes:
        found.append(Setting(size, None))
        if size > _MIB:
            found.append(Setting(size, _MIB))
    return found


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        setting: that was chosen.
        speedup: of its steps, compared with the default's; 1 for the default.
        tried: settings that were compared.
    """

    setting: Setting
    speedup: float
    tried: int


class BucketSearch:
    """
    Args:
        settings: the default first.
        seed: of the order of turns, the same on all ranks.
    """

    def __init__(self, settings: Sequence[Setting], seed: int = 0) -> None:
        self._default = settings[0]
        self._left = list(settings)
        self._tried = len(settings)
        self._order = random.Random(seed)
        self._ratios: dict[Setting, list[float]] = {setting: [] for setting in settings}
        self._repetitions = 0
        self._pairs = 0
        self.outcome: Outcome | None = None
        if len(settings) == 1:
            self.outcome = Outcome(self._default, 1.0, 1)

    def next_repetition(self) -> list[Setting]:
        """Who has a turn, in this order. Only while there is no outcome."""
        order = list(self._left)
        self._order.shuffle(order)
        return order

    def end_repetition(self, seconds: dict[Setting, float]) -> None:
        """
        Args:
            seconds: of a step, by setting of the repetition.
        """
        for setting in self._left:
            self._ratios[setting].append(seconds[setting] / seconds[self._default])
        self._repetitions += 1
        if len(self._left) > 2:
            if self._repetitions % REPETITIONS_BEFORE_HALVING == 0:
                self._halve()
            return
        self._pairs += 1
        if self._pairs >= FINAL_REPETITIONS:
            (best,) = (setting for setting in self._left if setting != self._default)
            ratio = statistics.median(self._ratios[best][-FINAL_REPETITIONS:])
            is_better = ratio < 1 - MIN_GAIN
            self.outcome = Outcome(best if is_better else self._default, 1 / ratio if is_better else 1.0, self._tried)

    def _halve(self) -> None:
        others = [setting for setting in self._left if setting != self._default]
        others.sort(key=lambda setting: statistics.median(self._ratios[setting]))
        kept = others[: max(1, len(others) // 2)]
        self._left = [self._default, *kept]
