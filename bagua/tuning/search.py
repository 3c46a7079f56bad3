"""Which setting makes steps fastest: the search, without anything that is measured or changed.

Settings take turns of a few steps. In each repetition all that are left have one turn, in another order each time, so
that whatever slows the machine down for a while does so for all; what counts is the ratio to the default's turn in the
same repetition.

1. Each algorithm with the default buckets and with small ones. If the default waits for no communication, nothing can
   be gained, and the search ends.
2. From these turns a model (bagua.tuning.cost_model) estimates the others. The most promising ones stay.
3. After some repetitions the slower half is dropped, until one is left.
   (Successive halving: Jamieson and Talwalkar, 2016, https://arxiv.org/abs/1502.07943.)
4. The last one and the default are compared in pairs. It is chosen only if it is faster by MIN_GAIN beyond the noise of
   the pairs; otherwise the default is.

A setting that an earlier run has found is compared in pairs at once.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bagua.tuning.cost_model import CostModel, Link
from bagua.tuning.setting import MIB, Outcome, Remembered, Setting, Tried, Turn

MIN_GAIN = 0.02
# If a smaller part of a step is exposed communication, no other setting can gain MIN_GAIN.
HIDDEN = MIN_GAIN
PROBE_REPETITIONS = 2
# Before the slower half is dropped: so many repetitions, or fewer if they differ by no more than QUIET.
MOST_REPETITIONS = 3
QUIET = 0.01
PROMISING = 12
# Of a few steps each, so that there are not more than 300 steps.
MAX_TURNS = 98
FEWEST_PAIRS, MOST_PAIRS = 5, 15
# By more than this part of a step, step times and exposed times have changed since an earlier run.
MOST_CHANGE = 0.2
CHECKS_OF_DEFAULT = 4
# Pairs are enough when the gain is so many standard errors from the limit.
_SURE = 2.0
_MOST_SPREAD = 1.0

Turns = Generator[list[Setting], Mapping[Setting, Turn], "Outcome"]


@dataclass(frozen=True)
class ModelLayout:
    """What the cost model needs to know of the model; see CostModel."""

    tensor_bytes: Sequence[int]
    default_bytes: int
    starts_small: bool


class Search:
    """
    Args:
        settings: the default first.
        remembered: what an earlier run has chosen, to be checked first.
        seed: of the order of turns.

    Attributes:
        turns: who has a turn now, in this order. Empty when there is an outcome.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        layout: ModelLayout | None = None,
        remembered: Remembered | None = None,
        seed: int = 0,
    ) -> None:
        self._settings = list(settings)
        self._default = settings[0]
        self._layout = layout
        self._remembered = remembered
        self._random = random.Random(seed)
        self._measured: dict[Setting, list[Turn]] = {}
        self._ratios: dict[Setting, list[float]] = {}
        self.outcome: Outcome | None = None
        self.turns: list[Setting] = []
        self._turns_had = 0
        self._repetitions: list[dict[Setting, float]] = []
        self._run = self._search()
        self._advance(None)

    def end_repetition(self, turns: Mapping[Setting, Turn]) -> None:
        """
        Args:
            turns: what `self.turns` have shown. `self.turns` and `self.outcome` are others afterwards.
        """
        self._turns_had += len(turns)
        self._repetitions.append({setting: turn.step_s for setting, turn in turns.items()})
        default = turns[self._default]
        for setting, turn in turns.items():
            self._measured.setdefault(setting, []).append(turn)
            self._ratios.setdefault(setting, []).append(turn.step_s / default.step_s)
        self._advance(turns)

    def best_so_far(self) -> Setting:
        """For a search that has to end now."""
        return min(self._ratios, key=self._ratio) if self._ratios else self._default

    def tried(self) -> tuple[Tried, ...]:
        """So far, the default first."""
        found = [
            Tried(
                setting,
                _median(turn.step_s for turn in turns),
                _median(turn.exposed_s for turn in turns),
                _median(turn.communication_s for turn in turns),
                self._ratio(setting),
                len(turns),
            )
            for setting, turns in self._measured.items()
        ]
        return tuple(sorted(found, key=lambda one: one.setting != self._default))

    def _advance(self, turns: Mapping[Setting, Turn] | None) -> None:
        try:
            self.turns = next(self._run) if turns is None else self._run.send(turns)
        except StopIteration as end:
            self.turns, self.outcome = [], end.value

    def compressed_speedup(self, share: float, compression_s_per_byte: float) -> float:
        """Of steps that send fewer bytes, compared with the default: an estimate from the default algorithm's turns,
        with the same buckets. NaN: it cannot be estimated.

        Args:
            share: of the bytes that are sent then.
            compression_s_per_byte: what compressing takes on this device, see bagua.engine.plan_tuner.
        """
        model = self._model([one for one in self._measured if one.algorithm == self._default.algorithm])
        link = None if model is None else model.link(self._default.algorithm)
        if model is None or link is None:
            return math.nan
        compressed = Link(link.latency_s, link.s_per_byte * share + compression_s_per_byte)
        return model.step_s(self._default) / model.step_s(self._default, compressed)

    def _model(self, measured: Sequence[Setting]) -> CostModel | None:
        if self._layout is None:
            return None
        return CostModel(
            self._layout.tensor_bytes,
            self._layout.default_bytes,
            self._layout.starts_small,
            {one: self._measured[one] for one in measured},
        )

    # --- the search --------------------------------------------------------------------------------------------------

    def _search(self) -> Turns:
        if len(self._settings) == 1:
            return Outcome(self._default, 1.0, "there is no other setting")
        if self._remembered is not None:
            outcome = yield from self._check(self._remembered)
            if outcome is not None:
                return outcome
        probes = self._probes()
        for _ in range(PROBE_REPETITIONS):
            yield self._shuffled(probes)
        default = self._measured[self._default]
        exposed = _median(turn.exposed_s / turn.step_s for turn in default)
        if exposed < HIDDEN:
            return self._outcome(self._default, 1.0, "communication is hidden: nothing to gain")
        left = self._promising(probes)
        while len(left) > 1:
            for number in range(1, MOST_REPETITIONS + 1):
                if self._turns_had + 1 + len(left) > MAX_TURNS - 2 * FEWEST_PAIRS:
                    left = self._ranked(left)[:1]
                    break
                yield self._shuffled([self._default, *left])
                if number > 1 and _median(_standard_error(self._ratios[one]) for one in left) < QUIET:
                    break
            left = self._ranked(left)[: max(1, len(left) // 2)]
        if self._ratio(left[0]) >= 1:
            return self._outcome(self._default, 1.0, "no other setting is faster")
        outcome = yield from self._pairs(left[0])
        return outcome

    def _check(self, remembered: Remembered) -> Generator[list[Setting], Mapping[Setting, Turn], Outcome | None]:
        """The outcome of an earlier run, if it is still right. That the default was best is, while it takes as long."""
        if remembered.setting != self._default:
            outcome = yield from self._pairs(remembered.setting)
            return replace(outcome, is_check=True) if outcome.setting == remembered.setting else None
        for _ in range(CHECKS_OF_DEFAULT):
            yield [self._default]
        turns = self._measured[self._default]
        now = _median(turn.step_s for turn in turns), _median(turn.exposed_s for turn in turns)
        step_s = max(now[0], remembered.default_step_s)
        then = remembered.default_step_s, remembered.default_exposed_s
        # NaN, which is not known, is not the same either.
        if all(abs(one - other) <= MOST_CHANGE * step_s for one, other in zip(now, then, strict=True)):
            same = self._outcome(self._default, 1.0, "steps take as long as when nothing was faster")
            return replace(same, is_check=True)
        return None

    def _probes(self) -> list[Setting]:
        small = [one for one in self._settings if one.bucket_bytes in (MIB, 2 * MIB) and one.first_bucket_bytes is None]
        found = [self._default]
        for setting in self._settings[1:]:
            is_default_size = (setting.bucket_bytes, setting.first_bucket_bytes) == (
                self._default.bucket_bytes,
                self._default.first_bucket_bytes,
            )
            if is_default_size:
                found.append(setting)
        for algorithm in dict.fromkeys(one.algorithm for one in self._settings):
            found += [one for one in small if one.algorithm == algorithm][-1:]
        return list(dict.fromkeys(found))

    def _promising(self, probes: Sequence[Setting]) -> list[Setting]:
        """Those with the shortest steps, measured or estimated, without the default."""
        others = self._settings[1:]
        model = self._model(probes)
        if model is None:
            fastest = min(probes, key=self._ratio).algorithm
            return [one for one in others if one.algorithm == fastest]
        base = model.step_s(self._default)

        def ratio(setting: Setting) -> float:
            if setting in self._ratios:
                return self._ratio(setting)
            estimate = model.step_s(setting) / base if base else math.nan
            return math.inf if math.isnan(estimate) else estimate

        return sorted(others, key=ratio)[:PROMISING]

    def _pairs(self, candidate: Setting) -> Turns:
        """The paired test; its outcome is the candidate or the default."""
        limit = math.log(1 - MIN_GAIN)
        logs: list[float] = []
        while True:
            turns = yield self._shuffled([self._default, candidate])
            logs.append(math.log(turns[candidate].step_s / turns[self._default].step_s))
            if len(logs) < FEWEST_PAIRS:
                continue
            middle = statistics.median(logs)
            spread = _standard_error(logs)
            is_last = len(logs) >= MOST_PAIRS or self._turns_had + 2 > MAX_TURNS
            if middle < limit and (middle + _SURE * spread < 0 or (is_last and middle + _MOST_SPREAD * spread < 0)):
                return self._outcome(candidate, math.exp(-middle), f"faster in {len(logs)} paired comparisons")
            if is_last or middle - _SURE * spread > limit:
                return self._outcome(self._default, 1.0, "no other setting is faster")

    def _outcome(self, setting: Setting, speedup: float, reason: str) -> Outcome:
        return Outcome(setting, speedup, reason, self.tried())

    def _ratio(self, setting: Setting) -> float:
        return statistics.median(self._ratios[setting])

    def _ranked(self, settings: Sequence[Setting]) -> list[Setting]:
        """The fastest first, by the repetitions in which all of them had turns, each compared with their median there:
        that is less noisy than the default's one turn."""
        scores: dict[Setting, list[float]] = {one: [] for one in settings}
        for repetition in self._repetitions:
            if all(one in repetition for one in settings):
                level = statistics.median(repetition[one] for one in settings)
                for one in settings:
                    scores[one].append(repetition[one] / level)
        return sorted(settings, key=lambda one: _median(scores[one]))

    def _shuffled(self, settings: Sequence[Setting]) -> list[Setting]:
        order = list(settings)
        self._random.shuffle(order)
        return order


def _standard_error(values: Sequence[float]) -> float:
    """Of the median, from the median absolute deviation: 1.4826 MAD estimates the standard deviation of a normal
    distribution, and the median's standard error is 1.2533 times that of the mean."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(values))


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan
