"""The run of every benchmark: each case is verified and timed once, and then measured in rounds, in turns, with as many
iterations a turn as fit into the time.

All sessions iterate equally often at a case. A turn is as long as `turn_s` where that fits; where it does not, turns
get shorter first, and then large sizes, of which a single iteration may fill a turn, get fewer iterations. A run that
is stopped early has fewer rounds of every case.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bagua.net.bench.errors import BenchError
from bagua.net.bench.measurement import LATENCY_LIMIT_BYTES, Case, Sample
from bagua.net.bench.turns import Turns
from bagua.progress import Progress

# A command may take this many times its estimate before it counts as hung.
_PATIENCE = 10
# Of the time limit. Cases that are not expected to be verified and timed once by then are left out.
_CALIBRATION_SHARE = 0.5
# What takes longer is known well enough from one turn; shorter ones are measured over more iterations.
_ONE_IS_ENOUGH_S = 0.005
_MORE_ITERATIONS = 20
# Of the time that is left: calibration is a guess, and what the limit cuts off is missing in the report.
_SHARE_OF_LIMIT = 0.85
# Shorter turns measure the waking up of threads and little else.
_MIN_TURN_S = 0.02
_SHORTEN = 0.9


def _growth(before: Case, case: Case) -> float:
    """How much longer a case takes than the one before it: latency does not grow with the size, and the time of the
    bytes grows in proportion. On a busy machine even a large size is mostly latency, so it is the geometric mean."""
    if before.collective != case.collective:
        return 0.0
    return math.sqrt(max(1.0, case.bytes / max(before.bytes, LATENCY_LIMIT_BYTES)))


class Session(Protocol):
    """One backend's running processes. While another has its turn, they are idle."""

    @property
    def name(self) -> str: ...

    def verify(self, case: Case, timeout_s: float) -> str | None:
        """What is wrong with the data; "" if every byte was right, None if this backend's bytes are not checked."""

    def run(self, case: Case, iterations: int, warmup: int, timeout_s: float) -> Sample: ...


@dataclass(frozen=True)
class Pace:
    """
    Attributes:
        timeout_s: of one command, beyond what it is expected to take.
        time_limit_s: of the run. The first round runs whatever it takes.
        turn_s: of the slowest session's turn, at most.
        iterations, warmup: as given; None: as many as fit, and a sixth of them.
        least: the fewest iterations of a turn, in order of preference; most: the most.
        single: so many iterations of a small case are timed one by one, on top.
        verifies_twice: time is kept for `verify` after the run.
        limit: the option that sets the time limit, as given.
    """

    rounds: int
    timeout_s: float
    time_limit_s: float
    turn_s: float
    iterations: int | None = None
    warmup: int | None = None
    least: tuple[int, ...] = (3, 2, 1)
    most: int = 1000
    single: int = 0
    verifies: bool = True
    verifies_twice: bool = False
    limit: str = ""


@dataclass(frozen=True)
class TurnPlan:
    iterations: int
    warmup: int
    operations: int  # of a turn, with warm-up


@dataclass(frozen=True)
class _Calibration:
    seconds: float  # an iteration
    overhead_s: float  # of a turn: the command's way, buffers, synchronization


class PacedRun:
    """
    Args:
        plan: the sessions of each case, in the order of the first round.
        give_up: ends a session that failed; the others go on. None: a failure ends the run.
        stop_reason: see Turns.take.

    Attributes:
        turns: by case and session's name; `errors` and `notes` say what is missing.
        verified: by case and session's name, whether the data was right; without those that were not checked.
        wrong: of those that were not, what was wrong.
        turn_plans: of each case that was measured.
    """

    def __init__(
        self,
        plan: Mapping[Case, Sequence[Session]],
        pace: Pace,
        progress: Callable[[int], Progress],
        *,
        give_up: Callable[[Session, BenchError], None] | None = None,
        stop_reason: Callable[[int], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._pace = pace
        self._progress = progress
        self._give_up = give_up
        self._stop_reason = stop_reason
        self._clock = clock
        self._deadline = clock() + pace.time_limit_s
        self._calibrations: dict[Case, dict[str, _Calibration]] = {}
        self._gone: set[str] = set()
        self._verify_s = 0.0
        self.turns: Turns[Sample] = Turns()
        self.verified: dict[tuple[Case, str], bool] = {}
        self.wrong: dict[tuple[Case, str], str] = {}
        self.turn_plans: Mapping[Case, TurnPlan] = {}

    def run(self) -> None:
        """
        Raises:
            BenchError: nothing was measured in time; without `give_up`, also what a session raised.
        """
        self._calibrate()
        self._measure()

    def verify(self) -> None:
        """Once more, as far as there is time: an error that only shows once all buffers and windows have grown."""
        with self._progress(sum(map(len, self._plan.values()))) as display:
            for case in self._calibrations:
                if self._clock() >= self._deadline:
                    self.turns.notes.append(f"no time was left to verify {case} and what comes after it once more")
                    return
                for session in self._alive(case):
                    self._guarded(session, partial(self._verify, case, session, display))
                    display.advance(f"verifying {case}, {session.name}")

    def faults(self) -> list[str]:
        """Lines about wrong data."""
        return [f"WRONG DATA: {name}, {case}: {wrong}" for (case, name), wrong in self.wrong.items()]

    def _alive(self, case: Case) -> list[Session]:
        return [session for session in self._plan[case] if session.name not in self._gone]

    def _guarded(self, session: Session, action: Callable[[], None]) -> None:
        try:
            action()
        except BenchError as error:
            if self._give_up is None:
                raise
            self._gone.add(session.name)
            self._give_up(session, error)
            self.turns.errors.append(f"{session.name}: {error}")

    def _verify(self, case: Case, session: Session, display: Progress) -> None:
        wrong = session.verify(case, self._pace.timeout_s)
        if wrong is not None:
            self.verified[case, session.name] = not wrong and self.verified.get((case, session.name), True)
        if wrong:
            self.wrong[case, session.name] = wrong
            display.message(f"WRONG DATA: {session.name}, {case}: {wrong}")

    def _calibrate(self) -> None:
        end = self._clock() + _CALIBRATION_SHARE * (self._deadline - self._clock())
        left_out: list[Case] = []
        before: Case | None = None
        with self._progress(sum(map(len, self._plan.values()))) as display:
            for case in self._plan:
                began = self._clock()
                if began >= end or began + self._expected_like(before, case) > end:
                    left_out.append(case)
                    continue
                for session in self._alive(case):
                    display.advance(f"verifying {case}, {session.name}", 0)
                    self._guarded(session, partial(self._calibrate_one, case, session, display))
                    display.advance(f"verifying {case}, {session.name}")
                before = case
        if not self._calibrations:
            raise BenchError(
                f"The time ended before anything was measured.\nRaise {self._pace.limit}, or measure less."
            )
        if left_out:
            self.turns.notes.append(
                f"left out: {', '.join(map(str, left_out))}: no time was left of {self._pace.limit} s;"
                " raise it, or measure less"
            )

    def _expected_like(self, before: Case | None, case: Case) -> float:
        """Seconds to calibrate a case: verified, timed and warmed up once, from what the one before it took."""
        found = self._calibrations.get(before, {}) if before is not None else {}
        return 3 * sum(one.seconds for one in found.values()) * (_growth(before, case) if before is not None else 0.0)

    def _calibrate_one(self, case: Case, session: Session, display: Progress) -> None:
        began = self._clock()
        if self._pace.verifies:
            self._verify(case, session, display)
            self._verify_s += self._clock() - began
        least = self._pace.least[-1]
        found = self._timed(case, session, least, 0 if self._pace.verifies else 1)
        if found.seconds * least < _ONE_IS_ENOUGH_S:
            found = self._timed(case, session, _MORE_ITERATIONS * least, 1)
        self._calibrations.setdefault(case, {})[session.name] = found

    def _timed(self, case: Case, session: Session, iterations: int, warmup: int) -> _Calibration:
        began = self._clock()
        seconds = session.run(case, iterations, warmup, self._pace.timeout_s).seconds
        return _Calibration(seconds, max(0.0, self._clock() - began - seconds * (iterations + warmup)))

    def _planned(self, case: Case, iterations: int) -> TurnPlan:
        warmup = max(1, min(20, iterations // 6)) if self._pace.warmup is None else self._pace.warmup
        single = min(self._pace.single, iterations) if case.wants_latency else 0
        return TurnPlan(iterations, warmup, iterations + warmup + single)

    def _expected_s(self, turns: Mapping[Case, TurnPlan]) -> float:
        return self._pace.rounds * sum(
            one.seconds * turns[case].operations + one.overhead_s
            for case, found in self._calibrations.items()
            for name, one in found.items()
            if name not in self._gone
        )

    def _fit(self, left_s: float) -> tuple[dict[Case, TurnPlan], float, bool]:
        """The longest turns with which all rounds are expected to end in time: their plan, how long they take, and
        whether that is in time. Where not even the shortest are, those."""
        pace, turns, expected = self._pace, dict[Case, TurnPlan](), 0.0
        slowest = {case: max(one.seconds for one in found.values()) for case, found in self._calibrations.items()}
        for least in pace.least:
            turn_s = max(_MIN_TURN_S, min(pace.turn_s, left_s))
            while True:
                turns = {
                    case: self._planned(case, pace.iterations or max(least, min(pace.most, round(turn_s / seconds))))
                    for case, seconds in slowest.items()
                }
                expected = self._expected_s(turns)
                if expected <= _SHARE_OF_LIMIT * left_s or pace.iterations is not None:
                    return turns, expected, expected <= left_s
                if turn_s <= _MIN_TURN_S:
                    break
                turn_s = max(_MIN_TURN_S, turn_s * _SHORTEN)
        return turns, expected, False

    def _measure(self) -> None:
        pace = self._pace
        left_s = self._deadline - self._clock()
        again_s = self._verify_s if pace.verifies_twice else 0.0
        turns, expected_s, fits = self._fit(left_s - again_s)
        if again_s and not fits:
            turns, expected_s, fits = self._fit(left_s)  # figures come before the second verification
        self.turn_plans = turns
        sessions = {case: {session.name: session for session in self._alive(case)} for case in turns}

        def measure(case: Case, name: str, _round: int) -> Sample:
            calibration, plan = self._calibrations[case][name], turns[case]
            patience = _PATIENCE * (calibration.seconds * plan.operations + calibration.overhead_s)
            try:
                return sessions[case][name].run(case, plan.iterations, plan.warmup, pace.timeout_s + patience)
            except BenchError as error:
                if self._give_up is not None:
                    self._gone.add(name)
                    self._give_up(sessions[case][name], error)
                raise

        with self._progress(sum(map(len, sessions.values())) * pace.rounds) as display:
            backends = len({name for names in sessions.values() for name in names})
            display.message(
                f"about {expected_s:.0f} s for {pace.rounds} repetitions of {len(turns)} sizes by {backends} backend"
                + ("" if backends == 1 else "s")
                + ("" if fits else f": more than is left of {pace.limit} s; some will be missing")
            )
            self.turns.take(
                {case: list(names) for case, names in sessions.items()},
                pace.rounds,
                measure,
                time_limit_s=max(left_s, 0.001),
                rounds_first=True,
                stop_reason=self._stop_reason,
                failures=() if self._give_up is None else (BenchError,),
                fails_everywhere=True,
                progress=display,
                clock=self._clock,
                limit=pace.limit,
            )
