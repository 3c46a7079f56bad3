"""Step times of all backends, the best of NCCL's own settings among them, and the ratios of our plugin to it and to
NCCL's default, taken within each round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME
from bagua.net.bench.verdict import PairedRatio, paired_ratio
from ddp_comparison.training_run import Training


@dataclass(frozen=True)
class StepTimes:
    """One backend, over all its rounds."""

    backend: str
    rounds: int
    step_ms: float
    step_ms_by_round: list[float]
    samples_per_second: float
    first_loss: float
    last_loss: float
    speedup: float | None  # over NCCL's default
    speedup_over_best: float | None  # None unless two or more of NCCL's own settings ran


@dataclass(frozen=True)
class Speedup:
    """Our step time against a baseline's; above 1 we are faster."""

    baseline: str
    backend: str  # which is that baseline
    ratio: PairedRatio

    def __str__(self) -> str:
        which = "" if self.backend == self.baseline else f" ({self.backend})"
        return f"bagua-net over {self.baseline}{which}: {self.ratio}"


@dataclass(frozen=True)
class StepReport:
    rows: list[StepTimes]
    best_tuned: str | None  # the backend
    speedups: list[Speedup]

    def as_dict(self) -> dict[str, object]:
        return {"best_tuned": self.best_tuned, "speedups": [asdict(speedup) for speedup in self.speedups]}


def report_steps(trainings: Sequence[Training], backends: Sequence[Backend]) -> StepReport:
    """The first backend is NCCL's default. One that failed on the way has fewer rounds and cannot be the best."""
    runs = {one.name: [t for t in trainings if t.backend == one.name] for one in backends}
    runs = {name: found for name, found in runs.items() if found}
    own = [one.name for one in backends if one.is_own_tcp and one.name in runs]
    whole = [name for name in own if len(runs[name]) == max(len(runs[other]) for other in own)]
    best = min(whole, key=lambda name: _median_ms(runs[name])) if len(own) > 1 else None
    default = backends[0].name if backends[0].name in runs else None
    rows = [_row(name, found, runs, default, best) for name, found in runs.items()]
    ours = next((one.name for one in backends if one.is_ours and one.name in runs), None)
    speedups = []
    for baseline, name in ((backends[0].name, default), (BEST_TUNED_NAME, best)):
        if name is not None and ours is not None and (ratio := _by_round(runs[name], runs[ours])) is not None:
            speedups.append(Speedup(baseline, name, ratio))
    return StepReport(rows, best, speedups)


def _median_ms(trainings: Sequence[Training]) -> float:
    return statistics.median(seconds for training in trainings for seconds in training.steady_step_seconds) * 1e3


def _row(
    name: str, trainings: Sequence[Training], runs: dict[str, list[Training]], default: str | None, best: str | None
) -> StepTimes:
    step_ms = _median_ms(trainings)
    return StepTimes(
        backend=name,
        rounds=len(trainings),
        step_ms=step_ms,
        step_ms_by_round=[training.step_ms for training in trainings],
        samples_per_second=statistics.median(training.samples_per_second for training in trainings),
        first_loss=trainings[0].losses[0],
        last_loss=trainings[0].losses[-1],
        speedup=_median_ms(runs[default]) / step_ms if default else None,
        speedup_over_best=_median_ms(runs[best]) / step_ms if best else None,
    )


def _by_round(theirs: Sequence[Training], mine: Sequence[Training]) -> PairedRatio | None:
    """Of the rounds that both have."""
    above, below = ({training.round: training.step_ms for training in side} for side in (theirs, mine))
    shared = [number for number in above if number in below]
    return paired_ratio([above[n] for n in shared], [below[n] for n in shared]) if shared else None
