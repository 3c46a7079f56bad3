"""From turns to rows: step times over all rounds, ratios to a baseline within each round, memory and agreement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.api import Event, PairedRatio, paired_ratio
from measure.core.catalogue import ALGORITHMS, ALL_REDUCE, REFERENCE, Promise

MIB = 1 << 20
# Of rounds of DDP against each other; three of them are hardly the largest difference there is.
_SPREAD_FACTOR = 3.0


@dataclass(frozen=True)
class TurnResult:
    """One turn, all ranks together."""

    model: str
    algorithm: str
    round: int
    step_seconds: list[float]  # of each step, or cycle of steps, the slowest rank's; see Turn.measure
    steps: int  # that rank 0 measured
    losses: list[float]  # of the measured steps that all ranks have, mean over the ranks
    parameters: int
    gradients: int
    peak_bytes: int | None  # the rank with most
    steps_peak_bytes: int | None
    own_cores: float  # of the measured steps; mean over the ranks
    machine_busy: float | None  # 0 to 1, as rank 0 read it
    averagings: int | None  # of rank 0's parameters in them; None: it does not average during its steps
    replicas_agree: bool
    largest_difference: float | None  # from DDP's final parameters; None: that is what the others are compared with
    relative_difference: float | None
    kept: str | None  # what a rank did not free

    @property
    def step_ms(self) -> float:
        return statistics.median(self.step_seconds) * 1e3


def turn_result(model: str, algorithm: str, number: int, events: Sequence[Event]) -> TurnResult:
    difference: Mapping[str, float] = events[0]["difference"] or {}
    kept = [f"rank {rank}: {event['kept']}" for rank, event in enumerate(events) if event["kept"]]
    return TurnResult(
        model=model,
        algorithm=algorithm,
        round=number,
        step_seconds=[max(step) for step in zip(*(event["step_seconds"] for event in events), strict=True)],
        steps=events[0]["steps"],
        losses=[statistics.fmean(step) for step in zip(*(event["losses"] for event in events), strict=False)],
        parameters=events[0]["parameters"],
        gradients=events[0]["gradients"],
        peak_bytes=_most([event["peak_bytes"] for event in events]),
        steps_peak_bytes=_most([event["steps_peak_bytes"] for event in events]),
        own_cores=statistics.fmean(event["own_cores"] for event in events),
        machine_busy=events[0]["machine_busy"],
        averagings=events[0]["averagings"],
        replicas_agree=all(event["fingerprint"] == events[0]["fingerprint"] for event in events),
        largest_difference=difference.get("largest"),
        relative_difference=difference.get("relative"),
        kept="; ".join(kept) or None,
    )


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class Row:
    """One algorithm with one model, over all its rounds."""

    model: str
    algorithm: str
    rounds: int
    step_ms: float  # median of all steps
    step_ms_low: float  # a tenth of the steps is below, a tenth above
    step_ms_high: float
    step_ms_by_round: list[float]
    speed_up: PairedRatio | None  # the baseline's step time over this one's: above 1 it is faster; None: it is itself
    peak_mib: float | None  # of the whole turn
    steps_peak_mib: float | None
    extra_bytes_per_parameter: float | None  # in measured steps, beyond gradient all-reduce, per element
    own_cores: float  # CPUs that a rank kept busy
    machine_busy: float | None
    steps_per_averaging: float | None  # None: it does not average during its steps
    promise: str  # see Promise
    replicas_agree: bool
    largest_difference: float | None
    relative_difference: float | None

    @property
    def busy_percent(self) -> float | None:
        return None if self.machine_busy is None else self.machine_busy * 100


def rows_of(turns: Sequence[TurnResult], baseline: str = REFERENCE) -> list[Row]:
    """In the order in which models and algorithms appeared."""
    cases = list(dict.fromkeys((turn.model, turn.algorithm) for turn in turns))
    models = list(dict.fromkeys(model for model, _ in cases))
    cases.sort(key=lambda case: models.index(case[0]))  # stable: algorithms keep their order
    return [_row(turns, model, algorithm, baseline) for model, algorithm in cases]


def promise_of(algorithm: str) -> Promise:
    return ALGORITHMS[algorithm].promise


def _row(turns: Sequence[TurnResult], model: str, algorithm: str, baseline: str) -> Row:
    mine = [turn for turn in turns if (turn.model, turn.algorithm) == (model, algorithm)]
    steps_ms = sorted(seconds * 1e3 for turn in mine for seconds in turn.step_seconds)
    peak = _most([turn.peak_bytes for turn in mine])
    steps_peak = _most([turn.steps_peak_bytes for turn in mine])
    return Row(
        model=model,
        algorithm=algorithm,
        rounds=len(mine),
        step_ms=statistics.median(steps_ms),
        step_ms_low=quantile(steps_ms, 0.1),
        step_ms_high=quantile(steps_ms, 0.9),
        step_ms_by_round=[turn.step_ms for turn in mine],
        speed_up=_speed_up(turns, model, algorithm, baseline),
        peak_mib=None if peak is None else peak / MIB,
        steps_peak_mib=None if steps_peak is None else steps_peak / MIB,
        extra_bytes_per_parameter=_extra_bytes_per_parameter(turns, model, algorithm),
        own_cores=statistics.fmean(turn.own_cores for turn in mine),
        machine_busy=_mean([turn.machine_busy for turn in mine]),
        steps_per_averaging=_steps_per_averaging(mine),
        promise=promise_of(algorithm).value,
        replicas_agree=all(turn.replicas_agree for turn in mine),
        largest_difference=_largest([turn.largest_difference for turn in mine]),
        relative_difference=_largest([turn.relative_difference for turn in mine]),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values where it falls between them."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _speed_up(turns: Sequence[TurnResult], model: str, algorithm: str, baseline: str) -> PairedRatio | None:
    """Of the rounds that both have; None for the baseline itself and without it."""
    if algorithm == baseline:
        return None
    times = {(turn.algorithm, turn.round): turn.step_ms for turn in turns if turn.model == model}
    shared = [number for name, number in times if name == algorithm and (baseline, number) in times]
    if not shared:
        return None
    return paired_ratio([times[baseline, n] for n in shared], [times[algorithm, n] for n in shared])


def _extra_bytes_per_parameter(turns: Sequence[TurnResult], model: str, algorithm: str) -> float | None:
    """Medians over rounds: on a CPU a single figure may hold what the allocator happened to keep."""
    if algorithm == ALL_REDUCE:
        return None

    def typical(name: str) -> float | None:
        own = [turn.steps_peak_bytes for turn in turns if (turn.model, turn.algorithm) == (model, name)]
        return statistics.median(known) if (known := [value for value in own if value is not None]) else None

    mine, plain = typical(algorithm), typical(ALL_REDUCE)
    parameters = next(turn.parameters for turn in turns if turn.model == model)
    return None if mine is None or plain is None else (mine - plain) / parameters


def _steps_per_averaging(turns: Sequence[TurnResult]) -> float | None:
    averagings = sum(turn.averagings or 0 for turn in turns)
    return sum(turn.steps for turn in turns) / averagings if averagings else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def faults_of(turns: Sequence[TurnResult], tolerance: float) -> list[str]:
    """What makes figures worthless: ranks or algorithms that did not train what they promise to."""
    faults = [
        f"{turn.algorithm} with {turn.model}, round {turn.round}: the ranks ended with different parameters"
        for turn in turns
        if not turn.replicas_agree and promise_of(turn.algorithm) is not Promise.OWN
    ]
    faults += [
        f"{turn.algorithm} with {turn.model}, round {turn.round}: the loss became {turn.losses[-1]}"
        for turn in turns
        if not math.isfinite(turn.losses[-1])
    ]
    for row in rows_of(turns):
        own = own_spread(turns, row.model)
        allowed = max(tolerance, _SPREAD_FACTOR * own)
        difference = row.relative_difference
        promised = promise_of(row.algorithm) is Promise.AS_DDP and row.algorithm != REFERENCE
        if promised and difference is not None and not difference <= allowed:
            faults.append(
                f"{row.algorithm} with {row.model}: final parameters differ from {REFERENCE}'s by {difference:.3g} of"
                f" the way from the start; allowed {allowed:.3g}, rounds of {REFERENCE} differ by {own:.3g}"
            )
    return faults


def own_spread(turns: Sequence[TurnResult], model: str) -> float:
    """How far rounds of DDP end from its first: what this machine's arithmetic does by itself."""
    own = [turn.relative_difference for turn in turns if (turn.model, turn.algorithm) == (model, REFERENCE)]
    finite = [value for value in own if value is not None and math.isfinite(value)]
    return max(finite, default=0.0)
