"""The run of the GPU comparison: verify and calibrate, prove the network, then turn by turn. One thread drives it.

A contender that fails (wrong network, wrong data, a crash, no answer in time) is ended and reported, and the others go
on: minutes on GPUs are too dear to lose to one of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab_group import Group, Timing
from bagua.net.bench.nccl_ab_plan import (
    CALIBRATION_ITERATIONS,
    Case,
    iterations_for,
    turns,
    warmup_for,
)
from bagua.net.bench.progress import Progress
from bagua.net.bench.sizes import format_size

# A turn may take this many times what its calibration foretold before it counts as hung.
_PATIENCE = 10
# Single iterations are timed for percentiles: more than this changes p99 little.
_MAX_SINGLE = 200


@dataclass(frozen=True)
class RunSettings:
    repetitions: int
    turn_seconds: float
    timeout_s: float
    time_limit_s: float  # of the whole run after the groups have formed
    verify: bool
    prove_network: bool  # False where the backend is not NCCL
    iterations: int | None = None  # None: as many as fill turn_seconds
    warmup: int | None = None


@dataclass
class RunOutcome:
    timings: dict[tuple[Case, int], list[Timing]] = field(default_factory=dict)
    verified: dict[tuple[Case, int], bool] = field(default_factory=dict)
    iterations: dict[Case, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    stopped_early: str | None = None  # why, if the time limit cut the run


class ComparisonRun:
    def __init__(
        self,
        groups: Sequence[Group],
        cases: Sequence[Case],
        settings: RunSettings,
        progress: Callable[[int], Progress],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._cases = cases
        self._settings = settings
        self._progress = progress
        self._clock = clock
        self._deadline = clock() + settings.time_limit_s
        self._estimates: dict[tuple[Case, int], float] = {}
        # No two verifications look for the same data, so that a stale result is a wrong one.
        self._salt = itertools.count(1)
        self.outcome = RunOutcome()

    def run(self) -> RunOutcome:
        self._prove()
        self._calibrate()
        self._measure()
        if self._settings.verify and self.outcome.stopped_early is None:
            self._verify_again()
        # Once more: by now every kind of connection has been opened and named in the logs.
        self._prove()
        return self.outcome

    def _alive(self) -> list[tuple[int, Group]]:
        return [(index, group) for index, group in enumerate(self._groups) if group.is_alive]

    def _fail(self, group: Group, error: BenchError | str) -> None:
        group.fail(error)
        self.outcome.errors.append(str(error))

    def _prove(self) -> None:
        if not self._settings.prove_network:
            return
        for _, group in self._alive():
            try:
                error = group.read_proofs(self._settings.timeout_s)
            except BenchError as failure:
                self._fail(group, failure)
            else:
                if error:
                    self._fail(group, error)

    def _out_of_time(self, doing: str) -> bool:
        if self.outcome.stopped_early is None and self._clock() >= self._deadline:
            self.outcome.stopped_early = f"the time limit of {self._settings.time_limit_s:g} s ended the run {doing}"
        return self.outcome.stopped_early is not None

    def _calibrate(self) -> None:
        with self._progress(len(self._cases) * len(self._groups)) as display:
            for case in self._cases:
                if self._out_of_time(f"while verifying, before {case.collective} of {format_size(case.bytes)}"):
                    return
                for index, group in self._alive():
                    display.advance(f"verifying {case.collective} {format_size(case.bytes)}, {group.contender.name}")
                    try:
                        self._verify(case, index, group)
                        if group.is_alive:
                            timing = group.time(case, CALIBRATION_ITERATIONS, 1, 0, self._settings.timeout_s)
                            self._estimates[case, index] = timing.seconds
                    except BenchError as error:
                        self._fail(group, error)
                self._plan_iterations(case)

    def _verify(self, case: Case, index: int, group: Group) -> None:
        if not self._settings.verify:
            return
        wrong = group.verify(case, next(self._salt), self._settings.timeout_s)
        self.outcome.verified[case, index] = wrong is None
        if wrong is not None:
            self._fail(group, wrong)

    def _plan_iterations(self, case: Case) -> None:
        estimates = [self._estimates[case, index] for index, _ in self._alive() if (case, index) in self._estimates]
        if self._settings.iterations is not None:
            self.outcome.iterations[case] = self._settings.iterations
        elif estimates:
            self.outcome.iterations[case] = iterations_for(max(estimates), self._settings.turn_seconds)

    def _measure(self) -> None:
        settings = self._settings
        total = len(self._cases) * len(self._groups) * settings.repetitions
        previous: Case | None = None
        with self._progress(total) as display:
            for turn in turns(self._cases, len(self._groups), settings.repetitions):
                # Between cases only: a repetition of a case is complete for every contender or for none.
                if turn.case is not previous and self._out_of_time(
                    f"in repetition {turn.repetition + 1} of {settings.repetitions}, before"
                    f" {turn.case.collective} of {format_size(turn.case.bytes)}"
                ):
                    return
                previous = turn.case
                group = self._groups[turn.contender]
                display.advance(
                    f"repetition {turn.repetition + 1}/{settings.repetitions}, {turn.case.collective}"
                    f" {format_size(turn.case.bytes)}, {group.contender.name}"
                )
                if group.is_alive:
                    self._take_turn(turn.case, turn.contender, group)

    def _take_turn(self, case: Case, index: int, group: Group) -> None:
        iterations = self.outcome.iterations[case]
        warmup = warmup_for(iterations) if self._settings.warmup is None else self._settings.warmup
        single = min(iterations, _MAX_SINGLE) if case.wants_latency else 0
        expected = self._estimates[case, index] * (iterations + warmup + single)
        try:
            timing = group.time(case, iterations, warmup, single, self._settings.timeout_s + _PATIENCE * expected)
        except BenchError as error:
            self._fail(group, error)
        else:
            self.outcome.timings.setdefault((case, index), []).append(timing)

    def _verify_again(self) -> None:
        """After the load as before it: an error that only shows once all buffers and windows have grown."""
        for case in self._cases:
            for index, group in self._alive():
                try:
                    self._verify(case, index, group)
                except BenchError as error:
                    self._fail(group, error)
