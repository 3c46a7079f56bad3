"""From trainings to rows: means over the seeds, differences from the baseline with their standard errors, verdicts.

Differences are paired: an algorithm's training is compared with the baseline's of the same seed, which began with the
same parameters and saw the same batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.api import Event
from measure.convergence.catalogue import (
    ACCURACY_LIMIT_POINTS,
    CASES,
    LOSS_LIMIT_PERCENT,
    TASKS,
    baseline_of,
)


@dataclass(frozen=True)
class TrainingResult:
    """One training, all ranks together. See training.Trained.

    source: of the data, see task.Task.
    software: see `software_of`.
    curve_bytes: sent per rank, mean over the ranks.
    """

    task: str
    case: str
    seed: int
    steps: int
    seconds: float  # the slowest rank's
    train_loss: float
    test_loss: float
    accuracy: float | None  # 0..1
    replica_test_loss: float
    spread: float
    averages: int | None
    staleness: float | None
    curve_steps: list[int]
    curve_loss: list[float]
    curve_bytes: list[float]
    source: str
    software: str


def software_of(facts: Mapping[str, object]) -> str:
    """Of RankTeam.facts: what has to be the same in one table."""
    named = {name: facts.get(name) for name in ("python", "torch", "nccl", "device")}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def training_result(task: str, case: str, seed: int, events: Sequence[Event], software: str) -> TrainingResult:
    names = (
        "source",
        "steps",
        "train_loss",
        "test_loss",
        "accuracy",
        "replica_test_loss",
        "spread",
        "averages",
        "staleness",
    )
    first = events[0]
    return TrainingResult(
        task=task,
        case=case,
        seed=seed,
        software=software,
        seconds=max(event["seconds"] for event in events),
        curve_steps=list(first["curve_steps"]),
        curve_loss=list(first["curve_loss"]),
        curve_bytes=[statistics.fmean(sent) for sent in zip(*(one["curve_bytes"] for one in events), strict=True)],
        **{name: first[name] for name in names},
    )


@dataclass(frozen=True)
class Spread:
    """Of one figure over the seeds. deviation: the standard deviation of a single training; 0 of one seed alone."""

    mean: float
    deviation: float


def spread_of(values: Sequence[float]) -> Spread:
    if not all(math.isfinite(value) for value in values):
        return Spread(math.inf, math.inf)
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True)
class Difference:
    """mean: of the paired differences from the baseline. error: the standard error of that mean; None of one pair."""

    mean: float
    error: float | None


def difference_of(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """In the unit of the values. A value that is no number makes it infinite: it is close to nothing."""
    gaps = [value - other for value, other in zip(values, reference, strict=True)]
    if not gaps or not all(math.isfinite(gap) for gap in gaps):
        return Difference(math.inf, None)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
    return Difference(statistics.fmean(gaps), error)


def relative_difference_of(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """In per cent of the reference's mean."""
    gap = difference_of(values, reference)
    base = statistics.fmean(reference) if reference else math.nan
    if not math.isfinite(gap.mean) or not base > 0:
        return Difference(math.inf, None)
    return Difference(gap.mean / base * 100, None if gap.error is None else gap.error / base * 100)


@dataclass(frozen=True)
class Reached:
    """The first time that a training's test loss is no more than LOSS_LIMIT_PERCENT above the baseline's final one.
    Between two evaluations the loss is taken for linear.

    sent: bytes per rank until then.
    """

    steps: float
    sent: float


def reached(training: TrainingResult, loss: float) -> Reached | None:
    """When the test loss is at most `loss`; None: never."""
    before: tuple[float, float, float] | None = None
    for step, sent, now in zip(training.curve_steps, training.curve_bytes, training.curve_loss, strict=True):
        if now <= loss:
            if before is None:
                return Reached(step, sent)
            step_before, sent_before, loss_before = before
            part = (loss_before - loss) / (loss_before - now) if math.isfinite(loss_before) else 1.0
            return Reached(step_before + part * (step - step_before), sent_before + part * (sent - sent_before))
        before = step, sent, now
    return None


def mean_reached(trainings: Sequence[TrainingResult], baselines: Sequence[TrainingResult]) -> Reached | None:
    """Over pairs of the same seed; None if one of them never is."""
    found = [
        reached(one, base.test_loss * (1 + LOSS_LIMIT_PERCENT / 100))
        for one, base in zip(trainings, baselines, strict=True)
    ]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return None
    return Reached(statistics.fmean(one.steps for one in known), statistics.fmean(one.sent for one in known))


@dataclass(frozen=True)
class Row:
    """One algorithm with one task, over all its seeds. Differences are those to `baseline`: of losses in per cent, of
    accuracy in points; more loss and more accuracy is positive."""

    task: str
    case: str
    baseline: str | None
    seeds: int
    train_loss: Spread
    test_loss: Spread
    accuracy: Spread | None  # in per cent
    train_loss_difference: Difference | None
    test_loss_difference: Difference | None
    accuracy_difference: Difference | None
    replica_test_loss: float  # mean over seeds and ranks, before averaging
    spread: float  # largest over the seeds
    steps_per_average: float | None  # over all seeds
    bytes_per_step: float  # sent per rank, mean over steps and seeds
    reached: Reached | None
    steps_per_second: float  # median over the seeds
    verdict: str

    @property
    def falls_short(self) -> bool:
        return self.verdict not in (HOLDS, "")


HOLDS = "holds"


def rows_of(trainings: Sequence[TrainingResult]) -> list[Row]:
    """In the order of the catalogue."""
    found = {(training.task, training.case) for training in trainings}
    return [_row(trainings, task, case) for task in TASKS for case in CASES if (task, case) in found]


def _row(trainings: Sequence[TrainingResult], task: str, case: str) -> Row:
    by_case = {
        name: {one.seed: one for one in trainings if (one.task, one.case) == (task, name)}
        for name in (case, baseline_of(task, case))
        if name is not None
    }
    mine = list(by_case[case].values())
    baseline = baseline_of(task, case)
    train_gap = test_gap = accuracy_gap = None
    found = mean_reached(mine, mine)
    if baseline is not None:
        shared = [seed for seed in by_case[case] if seed in by_case[baseline]]
        ours, theirs = ([by_case[name][seed] for seed in shared] for name in (case, baseline))
        train_gap = relative_difference_of([one.train_loss for one in ours], [one.train_loss for one in theirs])
        test_gap = relative_difference_of([one.test_loss for one in ours], [one.test_loss for one in theirs])
        found = mean_reached(ours, theirs)
        if all(one.accuracy is not None for one in mine):
            accuracy_gap = difference_of(_points(ours), _points(theirs))
    return Row(
        task=task,
        case=case,
        baseline=baseline,
        seeds=len(mine),
        train_loss=spread_of([one.train_loss for one in mine]),
        test_loss=spread_of([one.test_loss for one in mine]),
        accuracy=spread_of(_points(mine)) if all(one.accuracy is not None for one in mine) else None,
        train_loss_difference=train_gap,
        test_loss_difference=test_gap,
        accuracy_difference=accuracy_gap,
        replica_test_loss=statistics.fmean(one.replica_test_loss for one in mine),
        spread=max(one.spread for one in mine),
        steps_per_average=_steps_per_average(mine),
        bytes_per_step=statistics.fmean(one.curve_bytes[-1] / one.steps for one in mine),
        reached=found,
        steps_per_second=statistics.median(one.steps / one.seconds for one in mine),
        verdict=_verdict_of(mine, train_gap, test_gap, accuracy_gap) if baseline is not None else "",
    )


def _verdict_of(
    trainings: Sequence[TrainingResult],
    train: Difference | None,
    test: Difference | None,
    accuracy: Difference | None,
) -> str:
    diverged = sum(not math.isfinite(one.test_loss) for one in trainings)
    if diverged:
        return f"falls short: diverged with {diverged} of {len(trainings)} seeds"
    return verdict(train, test, accuracy)


def _steps_per_average(trainings: Sequence[TrainingResult]) -> float | None:
    averages = sum(one.averages or 0 for one in trainings)
    return sum(one.steps for one in trainings) / averages if averages else None


def _points(trainings: Sequence[TrainingResult]) -> list[float]:
    return [one.accuracy * 100 for one in trainings if one.accuracy is not None]


def verdict(train: Difference | None, test: Difference | None, accuracy: Difference | None) -> str:
    """HOLDS, or in what the algorithm is worse than its baseline by more than the limits. Better is no fault."""
    short = [
        f"{what} {gap.mean:+.2g} %"
        for what, gap in (("train loss", train), ("test loss", test))
        if gap is not None and not gap.mean <= LOSS_LIMIT_PERCENT
    ]
    if accuracy is not None and not accuracy.mean >= -ACCURACY_LIMIT_POINTS:
        short.append(f"accuracy {accuracy.mean:+.2g} points")
    return "falls short: " + ", ".join(short) if short else HOLDS


def mixed_trainings(trainings: Sequence[TrainingResult]) -> list[str]:
    """Tasks whose trainings are not comparable: of other data, with other software, or of another length."""
    found = []
    for task in TASKS:
        mine = [one for one in trainings if one.task == task]
        for what in ("source", "software", "steps"):
            values = sorted({str(getattr(one, what)) for one in mine})
            if len(values) > 1:
                found.append(
                    f"{task}: trainings that differ in {what} cannot be in one table: {'; '.join(values)}.\n"
                    "Run all of them with the same Python, packages and --steps."
                )
    return found


def faults_of(trainings: Sequence[TrainingResult]) -> list[str]:
    """What is no question of accuracy: replicas that have to be equal and are not."""
    return [
        f"{one.case} with {one.task}, seed {one.seed}: the ranks ended with different parameters ({one.spread:.2g} of"
        " their length apart)"
        for one in trainings
        # Values that are no numbers are equal to nothing, not even to each other: the verdict speaks of them.
        if not CASES[one.case].replicas_differ and one.spread != 0.0 and math.isfinite(one.test_loss)
    ]
