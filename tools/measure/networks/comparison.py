"""What the samples of one network say: each backend's times, and the ratios to NCCL's default and best setting.

Cases are sizes of all-reduce and models; variants are backends, and for models also algorithms over Bagua-Net.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.api import (
    BEST_TUNED_NAME,
    Figure,
    Label,
    PairedRatio,
    Turns,
    backend_label,
    figures,
    format_size,
    paired_ratio,
)
from measure.core.catalogue import REFERENCE
from measure.core.step_statistics import TurnResult
from measure.ranks.network import Network


@dataclass(frozen=True)
class Sample:
    """One turn."""

    network: str
    case: str
    variant: str
    round: int
    seconds: float  # of an all-reduce, or the median step; the slowest rank
    training: TurnResult | None = None


@dataclass(frozen=True)
class Case:
    """A size of all-reduce or a model."""

    name: str
    size_bytes: int | None = None
    model: str = ""
    wrapper: str = REFERENCE  # of the model

    def labels(self) -> dict[str, Label]:
        if self.size_bytes is None:
            return {"model": self.model} | ({} if self.wrapper == REFERENCE else {"wrapper": self.wrapper})
        return {"collective": "all_reduce", "size_bytes": self.size_bytes}


def size_case(size_bytes: int) -> Case:
    return Case(f"all-reduce {format_size(size_bytes)}", size_bytes)


def model_case(model: str, wrapper: str) -> Case:
    return Case(model if wrapper == REFERENCE else f"{model}, {wrapper}", model=model, wrapper=wrapper)


@dataclass(frozen=True)
class Row:
    """One case in one network. Times in seconds; a ratio is other over ours: above 1 ours is faster."""

    network: str
    case: str
    default: float
    best: float | None
    best_name: str | None  # None: only one of NCCL's own settings ran
    ours: float
    over_default: PairedRatio
    over_best: PairedRatio | None
    algorithms: Mapping[str, tuple[float, PairedRatio]]  # over Bagua-Net, the ratio to all-reduce over Bagua-Net

    @property
    def best_algorithm(self) -> str | None:
        return min(self.algorithms, key=lambda name: self.algorithms[name][0], default=None)


def best_tuned(turns: Turns[Sample], case: str, own: Sequence[str]) -> str | None:
    """The fastest of NCCL's own settings. A setting that failed has fewer rounds and is not considered."""
    found = {name: turns.of(case, name) for name in own}
    most = max(map(len, found.values()), default=0)
    whole = {name: _median(samples) for name, samples in found.items() if samples and len(samples) == most}
    return min(whole, key=lambda name: whole[name]) if len(own) > 1 and whole else None


def row_of(
    turns: Turns[Sample], network: str, case: str, own: Sequence[str], ours: str, algorithms: Sequence[str]
) -> Row | None:
    """None: NCCL's default, which is the first of `own`, or ours has no sample.

    Args:
        own: NCCL's own settings.
        algorithms: variants over Bagua-Net.
    """
    default = own[0]
    over_default = _ratio(turns, case, default, ours)
    if over_default is None:
        return None
    best = best_tuned(turns, case, own)
    found = {}
    for name in algorithms:
        if ratio := _ratio(turns, case, ours, name):
            found[name] = (_median(turns.of(case, name)), ratio)
    return Row(
        network,
        case,
        _median(turns.of(case, default)),
        None if best is None else _median(turns.of(case, best)),
        best,
        _median(turns.of(case, ours)),
        over_default,
        None if best is None else _ratio(turns, case, best, ours),
        found,
    )


def _ratio(turns: Turns[Sample], case: str, above: str, below: str) -> PairedRatio | None:
    pairs = turns.pairs(case, above, below)
    return paired_ratio([one.seconds for one, _ in pairs], [other.seconds for _, other in pairs]) if pairs else None


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median(one.seconds for one in samples)


def figures_of(
    row: Row, case: Case, turns: Turns[Sample], network: Network, where: Mapping[str, Label]
) -> list[Figure]:
    """`where`: ranks and GPUs."""
    labels = {**case.labels(), **network.labels(), **where}
    metric, factor = (("step_time", "ms"), 1e3) if case.size_bytes is None else (("time", "us"), 1e6)
    ours = "bagua-net"
    columns = {"NCCL default": "NCCL default", BEST_TUNED_NAME: row.best_name, ours: ours}
    columns |= {f"{ours} {name}": name for name in row.algorithms}
    found = []
    for label, variant in columns.items():
        if variant is None:
            continue
        setting = {"setting": variant} if label == BEST_TUNED_NAME else {}
        samples = turns.of(case.name, variant)
        backend = {"backend": backend_label(label), **setting, **labels}
        found += figures(backend, {metric: [one.seconds * factor for one in samples]})
        if losses := [one.training.losses[-1] for one in samples if one.training is not None]:
            found += figures(backend, {("loss", ""): losses})
    ratios = [(ours, "NCCL default", row.over_default), (ours, BEST_TUNED_NAME, row.over_best)]
    ratios += [(f"{ours} {name}", ours, ratio) for name, (_, ratio) in row.algorithms.items()]
    for variant, baseline, ratio in ratios:
        if ratio is not None:
            names = {"backend": backend_label(variant), "baseline": backend_label(baseline)}
            if baseline == BEST_TUNED_NAME and row.best_name is not None:
                names["setting"] = row.best_name
            found.append(
                Figure({**names, **labels}, "speedup", "x", ratio.median, ratio.low, ratio.high, ratio.repetitions)
            )
    return found


def training_faults(
    turns: Turns[Sample], case: str, default: str, algorithms: Sequence[str], tolerance: float
) -> list[str]:
    """What makes step times worthless: losses that are not those of NCCL's default, or are not numbers.

    Args:
        algorithms: variants that train differently, whose losses need only be finite.
        tolerance: relative to the first loss; rounds of the default that differ by more raise it.
    """
    trained = {
        name: [one.training for one in found.values() if one.training is not None]
        for (where, name), found in turns.samples.items()
        if where == case
    }
    reference = next(iter(trained.get(default, [])), None)
    if reference is None:
        return []
    own = max((relative_difference(reference.losses, one.losses) for one in trained[default]), default=0.0)
    # If even the default's losses are NaN, nothing can be compared, and nothing may pass.
    allowed = max(tolerance, own) if math.isfinite(own) else tolerance
    faults = []
    for name, mine in trained.items():
        if name in algorithms:
            faults += [f"the loss of {name} with {case} became {one.losses[-1]}" for one in mine if not _finite(one)]
            continue
        if (gap := max(relative_difference(reference.losses, one.losses) for one in mine)) > allowed:
            faults.append(
                f"losses of {name} with {case} differ from those of {default} by {gap:.3g} (relative to the first"
                f" loss); allowed {allowed:.3g}, rounds of {default} differ by {own:.3g}"
            )
        faults += [
            f"{name} with {case}: the ranks ended with different parameters" for one in mine if not one.replicas_agree
        ]
    return faults


def _finite(one: TurnResult) -> bool:
    return all(map(math.isfinite, one.losses))


def relative_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference of any step, relative to the first loss, because late losses are close to zero."""
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # NaN compares as false with everything, so it would pass any limit.
    if not all(math.isfinite(gap) for gap in gaps):
        return math.inf
    return max(gaps) / max(abs(left[0]), 1e-12)
