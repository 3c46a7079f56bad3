"""The run of the GPU comparison: verify and calibrate, prove the network, then turn by turn. One thread drives it.

A backend that fails (wrong network, wrong data, a crash, no answer in time) is ended and reported, and the others go
on: minutes on GPUs are too dear to lose to one of them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.duration import Calibration, RunPlan, fitting_plan, fixed_plan
from bagua.net.bench.nccl_ab.group import Group, Timing
from bagua.net.bench.nccl_ab.plan import Case, Turn, turns
from bagua.net.bench.progress import Progress
from bagua.net.bench.sizes import format_size

# A turn may take this many times what its calibration foretold before it counts as hung.
_PATIENCE = 10
# An iteration that takes longer is known well enough from one; shorter ones are measured a few times.
_ONE_IS_ENOUGH_S = 0.02
_CALIBRATION_ITERATIONS = 4
# Of the time limit. Sizes that are not verified by then are given up, for the others to be measured.
_CALIBRATION_SHARE = 0.5


@dataclass(frozen=True)
class RunSettings:
    repetitions: int
    turn_seconds: float  # at most; turns are shorter where the time limit asks for it
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
    expected_s: float = 0.0  # of all turns, as planned
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what there was no time for
    stopped_early: str | None = None  # why, if the time limit cut the measuring


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
        began = clock()
        self._calibration_deadline = began + _CALIBRATION_SHARE * settings.time_limit_s
        self._deadline = began + settings.time_limit_s
        self._calibrations: dict[tuple[Case, int], Calibration] = {}
        self._verify_s = 0.0  # what all verifications took, which will be repeated at the end
        self._plan = RunPlan({}, 0.0, True)
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

    def _out_of_time(self, turn: Turn) -> bool:
        if self._clock() >= self._deadline:
            settings = self._settings
            self.outcome.stopped_early = (
                f"the time limit of {settings.time_limit_s:g} s ended the run in repetition {turn.repetition + 1} of"
                f" {settings.repetitions}, before {turn.case.collective} of {format_size(turn.case.bytes)}"
            )
        return self.outcome.stopped_early is not None

    def _calibrate(self) -> None:
        with self._progress(len(self._cases) * len(self._groups)) as display:
            for number, case in enumerate(self._cases):
                if self._clock() >= self._calibration_deadline:
                    self.outcome.notes.append(
                        f"verifying took {_CALIBRATION_SHARE:.0%} of the time limit of"
                        f" {self._settings.time_limit_s:g} s: {case.collective} of {format_size(case.bytes)} and what"
                        " comes after it are missing; raise --time-limit, or leave sizes or backends out"
                    )
                    self._cases = self._cases[:number]
                    return
                for index, group in self._alive():
                    display.advance(f"verifying {case.collective} {format_size(case.bytes)}, {group.backend.name}")
                    try:
                        began = self._clock()
                        self._verify(case, index, group)
                        self._verify_s += self._clock() - began
                        if group.is_alive:
                            self._calibrations[case, index] = self._calibrated(case, group)
                    except BenchError as error:
                        self._fail(group, error)

    def _calibrated(self, case: Case, group: Group) -> Calibration:
        """After a verification, if there was one: everything is connected. A large size is not repeated more than it
        must be: eleven backends with 1 GiB each add up."""
        warmup = 0 if self._settings.verify else 1
        found = self._calibrated_by(case, group, 1, warmup)
        return (
            found if found.seconds > _ONE_IS_ENOUGH_S else self._calibrated_by(case, group, _CALIBRATION_ITERATIONS, 1)
        )

    def _calibrated_by(self, case: Case, group: Group, iterations: int, warmup: int) -> Calibration:
        began = self._clock()
        seconds = group.time(case, iterations, warmup, 0, self._settings.timeout_s).seconds
        return Calibration(seconds, max(0.0, self._clock() - began - seconds * (iterations + warmup)))

    def _verify(self, case: Case, index: int, group: Group) -> None:
        if not self._settings.verify:
            return
        wrong = group.verify(case, next(self._salt), self._settings.timeout_s)
        self.outcome.verified[case, index] = wrong is None
        if wrong is not None:
            self._fail(group, wrong)

    def _make_plan(self) -> RunPlan:
        settings = self._settings
        alive = {index for index, _ in self._alive()}
        found: dict[Case, list[Calibration]] = {}
        for (case, index), calibration in self._calibrations.items():
            if index in alive:
                found.setdefault(case, []).append(calibration)
        left = self._deadline - self._clock()
        if settings.iterations is not None:
            return fixed_plan(found, settings.repetitions, settings.iterations, settings.warmup, left)
        # Figures come before the second verification, where there is no time for both.
        plan = fitting_plan(found, settings.repetitions, settings.turn_seconds, settings.warmup, left - self._verify_s)
        if plan.fits:
            return plan
        return fitting_plan(found, settings.repetitions, settings.turn_seconds, settings.warmup, left)

    def _forecast(self) -> str:
        settings, plan = self._settings, self._plan
        again = f", then {self._verify_s:.0f} s to verify again" if settings.verify else ""
        text = (
            f"about {plan.expected_s:.0f} s for {settings.repetitions} repetitions of {len(self._cases)} sizes by"
            f" {len(self._alive())} backends{again}"
        )
        if plan.fits:
            return text
        return (
            f"{text}: more than is left of the time limit of {settings.time_limit_s:g} s, so that repetitions will be"
            " missing; raise --time-limit, or lower -e/--maxbytes, --repeats or the number of backends"
        )

    def _measure(self) -> None:
        settings = self._settings
        self._plan = self._make_plan()
        self.outcome.expected_s = self._plan.expected_s
        self.outcome.iterations = {case: turn.iterations for case, turn in self._plan.turns.items()}
        total = len(self._cases) * len(self._groups) * settings.repetitions
        previous: Case | None = None
        with self._progress(total) as display:
            display.message(self._forecast())
            for turn in turns(self._cases, len(self._groups), settings.repetitions):
                # Between cases only: a repetition of a case is complete for every backend or for none.
                if turn.case is not previous and self._out_of_time(turn):
                    return
                previous = turn.case
                group = self._groups[turn.backend]
                display.advance(
                    f"repetition {turn.repetition + 1}/{settings.repetitions}, {turn.case.collective}"
                    f" {format_size(turn.case.bytes)}, {group.backend.name}"
                )
                if group.is_alive:
                    self._take_turn(turn.case, turn.backend, group)

    def _take_turn(self, case: Case, index: int, group: Group) -> None:
        plan = self._plan.turns[case]
        expected = self._calibrations[case, index].seconds * plan.operations
        timeout_s = self._settings.timeout_s + _PATIENCE * expected
        try:
            timing = group.time(case, plan.iterations, plan.warmup, plan.single, timeout_s)
        except BenchError as error:
            self._fail(group, error)
        else:
            self.outcome.timings.setdefault((case, index), []).append(timing)

    def _verify_again(self) -> None:
        """After the load as before it: an error that only shows once all buffers and windows have grown."""
        for case in self._cases:
            if self._clock() >= self._deadline:
                self.outcome.notes.append(
                    f"the time limit of {self._settings.time_limit_s:g} s left none to verify {case.collective} of"
                    f" {format_size(case.bytes)} and what comes after it again after the measuring"
                )
                return
            for index, group in self._alive():
                try:
                    self._verify(case, index, group)
                except BenchError as error:
                    self._fail(group, error)
