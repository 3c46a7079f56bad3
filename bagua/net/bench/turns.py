"""Interleaved measurement: the variants of each case take turns, so that drift of the machine affects all of them.

All comparisons use it. A case is what is measured (a model, a network, a size), a variant is one way to do it (an
algorithm, a backend, a commit), and a sample is what the caller's function returns for one turn. Ratios are computed
within a round; see bagua.net.bench.verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from bagua.net.bench.errors import BenchError
from bagua.progress import Progress

Sample = TypeVar("Sample")
_Runner = TypeVar("_Runner")


def rotated(sessions: Sequence[_Runner], turn: int) -> list[_Runner]:
    """The order of one turn. The first one to run finds caches and CPU clocks as another left them, so all take this
    position equally often."""
    if not sessions:
        return []
    start = turn % len(sessions)
    return [*sessions[start:], *sessions[:start]]


class Turns(Generic[Sample]):
    """The samples of a comparison, with errors and notes. If `take` raises, the samples until then are kept.

    Attributes:
        samples: by (case, variant), then by round. A case is a name, or anything hashable that str() names.
        errors: failures, and cases that were never measured.
        notes: why a case has fewer rounds than requested.
        failed: each (case, variant) that failed and was therefore skipped from then on.
    """

    def __init__(self) -> None:
        self.samples: dict[tuple[Any, str], dict[int, Sample]] = {}
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.failed: set[tuple[Any, str]] = set()

    def of(self, case: Any, variant: str) -> list[Sample]:
        """The samples in the order of their rounds."""
        return [sample for _, sample in sorted(self.samples.get((case, variant), {}).items())]

    def all(self) -> list[Sample]:
        """All samples, case by case, variant by variant."""
        return [sample for by_round in self.samples.values() for sample in by_round.values()]

    def pairs(self, case: Any, one: str, other: str) -> list[tuple[Sample, Sample]]:
        """The samples of both variants, of the rounds that both have."""
        mine, theirs = (self.samples.get((case, name), {}) for name in (one, other))
        return [(mine[number], theirs[number]) for number in sorted(mine) if number in theirs]

    def take(
        self,
        plan: Mapping[Any, Sequence[str]],
        rounds: int,
        measure: Callable[[Any, str, int], Sample],
        *,
        time_limit_s: float = math.inf,
        rounds_first: bool = False,
        least_rounds: int = 1,
        stop_reason: Callable[[int], str | None] = lambda _: None,
        failures: tuple[type[Exception], ...] = (BenchError,),
        fails_everywhere: bool = False,
        limit: str = "",
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            plan: The variants of each case, in the order of the first round. Each further round starts with the next
                variant.
            rounds: The number of samples of each variant in each case.
            measure: Called with case, variant and round number; returns the sample. If it raises one of `failures`,
                the variant is skipped in the further rounds of this case.
            time_limit_s: The limit for all cases. Each case gets an equal share, so that a slow one does not take the
                time of the others. A round does not start if the longest one so far would not fit, and it is never cut
                short, so that all variants have the same number of samples.
            rounds_first: Run a round of all cases before the next round. By default all rounds of a case run before the
                next case.
            least_rounds: The number of rounds that run even without time for them, if the first starts in time.
            stop_reason: Called with the number of rounds that ran; returns why no more are needed, or None.
            failures: The exceptions that skip a variant. All others end the measurement.
            fails_everywhere: Skip a variant that failed in all cases, and not only in this one.
            limit: The option that sets the time limit, as given. Default: --time-limit with `time_limit_s`.
            progress: Advanced by one step for each turn.
        """
        deadline = clock() + time_limit_s
        limit = limit or f"--time-limit {time_limit_s:g}"
        groups = [list(plan)] if rounds_first else [[case] for case in plan]
        for place, cases in enumerate(groups):
            now = clock()
            if now >= deadline:
                left_out = [case for group in groups[place:] for case in group]
                self.errors.append(
                    f"{limit} s was over before {', '.join(map(str, left_out))}; allow more time, or measure less"
                )
                return
            end = now + (deadline - now) / (len(groups) - place)
            longest = 0.0
            for number in range(rounds):
                began = clock()
                why = stop_reason(number) if number else None
                if why is None and number >= least_rounds and longest > end - began:
                    left = f"{max(0.0, end - began):.0f} s are left of {limit}"
                    why = f"another takes {longest:.0f} s, and {left}"
                if why is not None:
                    where = "" if rounds_first else f"{cases[0]}: "
                    self.notes.append(f"{where}{number} of {rounds} rounds ran: {why}")
                    break
                for case in cases:
                    for variant in rotated(plan[case], number):
                        if not any(name == variant for of, name in self.failed if fails_everywhere or of == case):
                            self._turn(case, variant, number, f"{number + 1}/{rounds}", measure, failures, progress)
                longest = max(longest, clock() - began)

    def _turn(
        self,
        case: Any,
        variant: str,
        number: int,
        round_text: str,
        measure: Callable[[Any, str, int], Sample],
        failures: tuple[type[Exception], ...],
        progress: Progress | None,
    ) -> None:
        what = ", ".join(word for word in (str(case), variant, f"round {round_text}") if word)
        if progress is not None:
            progress.advance(what, 0)
        try:
            self.samples.setdefault((case, variant), {})[number] = measure(case, variant, number)
        except failures as error:
            text = f"{' with '.join(word for word in (variant, str(case)) if word)}: {error}"
            self.failed.add((case, variant))
            self.errors.append(text)
            if progress is not None:
                progress.message(f"FAILED: {text}")
        if progress is not None:
            progress.advance(what)
