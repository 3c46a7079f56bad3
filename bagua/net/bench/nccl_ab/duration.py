"""How many iterations a turn of each case has, and how long all turns take: from what calibration measured.

A turn is as long as --turn-seconds where that fits into the time limit; where it does not, turns get shorter first, and
then the large sizes, of which a single iteration may fill a turn, get fewer iterations. No clock, no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.nccl_ab.plan import Case

MIN_ITERATIONS = 3
MAX_ITERATIONS = 1000
# Single iterations are timed for percentiles: more than this changes p99 little.
MAX_SINGLE = 200
# Shorter turns measure the waking up of threads and little else.
MIN_TURN_S = 0.02
# Of the time that is left: calibration is a guess, and what the limit cuts off is missing in the report.
SHARE_OF_LIMIT = 0.85

_SHORTEN = 0.9


@dataclass(frozen=True)
class Calibration:
    """What one backend needs for one case."""

    seconds: float  # an iteration
    overhead_s: float = 0.0  # of a turn: the command's way, buffers, synchronization


@dataclass(frozen=True)
class TurnPlan:
    iterations: int
    warmup: int
    single: int  # timed one by one, after the batch

    @property
    def operations(self) -> int:
        return self.iterations + self.warmup + self.single


@dataclass(frozen=True)
class RunPlan:
    turns: Mapping[Case, TurnPlan]
    expected_s: float  # of all turns
    fits: bool


def iterations_for(seconds_per_iteration: float, turn_seconds: float, least: int = MIN_ITERATIONS) -> int:
    """As many as fill a turn. Asked with the slowest backend's time, so that all backends iterate alike."""
    if seconds_per_iteration <= 0:
        raise ValueError(f"an iteration of {seconds_per_iteration} s was measured; a time must be positive")
    return max(least, min(MAX_ITERATIONS, round(turn_seconds / seconds_per_iteration)))


def warmup_for(iterations: int) -> int:
    """The backend was idle while the others had their turns: its threads sleep and its TCP windows have shrunk."""
    return max(1, min(20, iterations // 10))


def turn_plan(case: Case, iterations: int, warmup: int | None) -> TurnPlan:
    single = min(iterations, MAX_SINGLE) if case.wants_latency else 0
    return TurnPlan(iterations, warmup_for(iterations) if warmup is None else warmup, single)


def expected_seconds(
    calibrations: Mapping[Case, Sequence[Calibration]], turns: Mapping[Case, TurnPlan], repetitions: int
) -> float:
    return repetitions * sum(
        one.seconds * turns[case].operations + one.overhead_s for case, found in calibrations.items() for one in found
    )


def fixed_plan(
    calibrations: Mapping[Case, Sequence[Calibration]],
    repetitions: int,
    iterations: int,
    warmup: int | None,
    left_s: float,
) -> RunPlan:
    """-n as given, whatever it takes."""
    turns = {case: turn_plan(case, iterations, warmup) for case in calibrations}
    expected = expected_seconds(calibrations, turns, repetitions)
    return RunPlan(turns, expected, expected <= left_s)


def fitting_plan(
    calibrations: Mapping[Case, Sequence[Calibration]],
    repetitions: int,
    turn_seconds: float,
    warmup: int | None,
    left_s: float,
) -> RunPlan:
    """The longest turns, up to `turn_seconds`, with which all repetitions are expected to end within SHARE_OF_LIMIT of
    `left_s`. Where not even the shortest do, those: the run then ends early, with few repetitions of every size."""
    plan = RunPlan({}, 0.0, True)
    for least in range(MIN_ITERATIONS, 0, -1):
        turn = turn_seconds
        while True:
            turns = {
                case: turn_plan(case, iterations_for(max(one.seconds for one in found), turn, least), warmup)
                for case, found in calibrations.items()
            }
            expected = expected_seconds(calibrations, turns, repetitions)
            plan = RunPlan(turns, expected, expected <= SHARE_OF_LIMIT * left_s)
            if plan.fits:
                return plan
            if turn <= MIN_TURN_S:
                break
            turn = max(MIN_TURN_S, turn * _SHORTEN)
    return plan
