"""Who is measured when: variants of several cases in turns, so that a drift of the machine falls on all of them alike.

Every comparison stands on this: a case is what is measured (a model, a network, a size), a variant is one way to do it
(an algorithm, a backend, a commit), and a sample is what the caller's function returns of one turn. Ratios are taken
within a round, see bagua.net.bench.verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from bagua.net.bench.errors import BenchError
from bagua.net.bench.progress import Progress

Sample = TypeVar("Sample")
_Runner = TypeVar("_Runner")


def rotated(sessions: Sequence[_Runner], turn: int) -> list[_Runner]:
    """Whoever runs first finds the caches and the CPU's clock as another left them; each takes its turn."""
    if not sessions:
        return []
    start = turn % len(sessions)
    return [*sessions[start:], *sessions[:start]]


class Turns(Generic[Sample]):
    """What was measured, and what was not. One thread. Whatever `take` raises, what was measured until then stays.

    Attributes:
        samples: of each (case, variant), by round.
        errors: what failed or was never measured.
        notes: of how many rounds there was no time for.
        failed: (case, variant) that failed, and so had no further turns.
    """

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str], dict[int, Sample]] = {}
        self.errors: list[str] = []
        self.notes: list[str] = []
        self.failed: set[tuple[str, str]] = set()

    def of(self, case: str, variant: str) -> list[Sample]:
        """In the order of the rounds."""
        return [sample for _, sample in sorted(self.samples.get((case, variant), {}).items())]

    def pairs(self, case: str, one: str, other: str) -> list[tuple[Sample, Sample]]:
        """Of the rounds that both have."""
        mine, theirs = (self.samples.get((case, name), {}) for name in (one, other))
        return [(mine[number], theirs[number]) for number in sorted(mine) if number in theirs]

    def take(
        self,
        plan: Mapping[str, Sequence[str]],
        rounds: int,
        measure: Callable[[str, str, int], Sample],
        *,
        time_limit_s: float = math.inf,
        rounds_first: bool = False,
        least_rounds: int = 1,
        needless: Callable[[int], str | None] = lambda _: None,
        failures: tuple[type[Exception], ...] = (BenchError,),
        progress: Progress | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            plan: the variants of each case, in the order in which the first round has them; the next round begins with
                the next variant.
            measure: takes a turn: case, variant, round. If it raises one of `failures`, the variant is left out of that
                case from then on.
            time_limit_s: for all. Cases share it evenly, so that a slow one does not take the time of those after it.
                A round is not begun if the longest one before it would not fit, and never cut short: variants have
                equally many.
            rounds_first: all cases have a round before any has the next; otherwise a case has all of its rounds.
            least_rounds: this many are begun even if there is no time for them, but the first only before the limit.
            needless: asked with the number of rounds that ran; why no more of the case are needed.
            progress: has a step for each turn.
        """
        deadline = clock() + time_limit_s
        groups = [list(plan)] if rounds_first else [[case] for case in plan]
        for place, cases in enumerate(groups):
            now = clock()
            if now >= deadline:
                left_out = [case for group in groups[place:] for case in group]
                self.errors.append(
                    f"--time-limit {time_limit_s:g} s was over before {', '.join(left_out)}; allow more time, or"
                    " measure less"
                )
                return
            end = now + (deadline - now) / (len(groups) - place)
            longest = 0.0
            for number in range(rounds):
                began = clock()
                why = needless(number) if number else None
                if why is None and number >= least_rounds and longest > end - began:
                    left = f"{max(0.0, end - began):.0f} s are left of --time-limit {time_limit_s:g}"
                    why = f"another takes {longest:.0f} s, and {left}"
                if why is not None:
                    self.notes.append(
                        f"{'' if rounds_first else f'{cases[0]}: '}{number} of {rounds} rounds ran: {why}"
                    )
                    break
                for case in cases:
                    for variant in rotated(plan[case], number):
                        self._turn(case, variant, number, f"{number + 1}/{rounds}", measure, failures, progress)
                longest = max(longest, clock() - began)

    def _turn(
        self,
        case: str,
        variant: str,
        number: int,
        round_text: str,
        measure: Callable[[str, str, int], Sample],
        failures: tuple[type[Exception], ...],
        progress: Progress | None,
    ) -> None:
        if (case, variant) in self.failed:
            return
        what = ", ".join(word for word in (case, variant, f"round {round_text}") if word)
        if progress is not None:
            progress.advance(what, 0)
        try:
            self.samples.setdefault((case, variant), {})[number] = measure(case, variant, number)
        except failures as error:
            text = f"{' with '.join(word for word in (variant, case) if word)}: {error}"
            self.failed.add((case, variant))
            self.errors.append(text)
            if progress is not None:
                progress.message(f"FAILED: {text}")
        if progress is not None:
            progress.advance(what)
