"""From timings to figures: a row a backend and case, the best of NCCL's own settings for each case, and the ratios of
our plugin to all of them, taken within each repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.plan import Case, link_bytes
from bagua.net.bench.nccl_ab.run import RunOutcome
from bagua.net.bench.verdict import PairedRatio, paired_ratio

BEST_TUNED_NAME = "best tuned"

# What repeating the same measurement may differ by: "slower" below means slower by more.
NOISE = 0.03

# Below this a figure per GB says how long Python takes to launch, not what the network costs.
_CPU_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Ratio:
    """Our time against another backend's at one case; above 1 we are faster."""

    case: Case
    baseline: str
    speedup: PairedRatio

    @property
    def is_slower(self) -> bool:
        return self.speedup.median < 1 / (1 + NOISE)


@dataclass(frozen=True)
class BestTuned:
    """Of NCCL's own settings the one with the least median time at one case, and our ratio to it."""

    row: Measurement
    ratio: Ratio | None  # None where our plugin was not measured

    @property
    def setting(self) -> str:
        """For a table that says NCCL already: "t2s2 8ch", "default"."""
        return self.row.backend.removeprefix("NCCL ")


@dataclass(frozen=True)
class Results:
    rows: Sequence[Measurement]
    ratios: Sequence[Ratio]  # to each single backend
    best: Sequence[BestTuned]  # empty unless two or more of NCCL's own settings ran

    def best_of(self, collective: str) -> dict[int, BestTuned]:
        return {best.row.bytes: best for best in self.best if best.row.collective == collective}

    def ratios_to(self, baseline: str, collective: str) -> list[Ratio]:
        """By size; the baseline may be BEST_TUNED_NAME."""
        if baseline == BEST_TUNED_NAME:
            return [best.ratio for best in self.best_of(collective).values() if best.ratio is not None]
        return [r for r in self.ratios if r.baseline == baseline and r.case.collective == collective]


def results_of(cases: Sequence[Case], groups: Sequence[Group], outcome: RunOutcome, ranks: int) -> Results:
    places = [(case, index) for case in cases for index in range(len(groups))]
    rows = {place: _row(place, groups, outcome, ranks) for place in places if outcome.timings.get(place)}
    ratios = {place: ratio for place in rows if (ratio := _ratio(place, groups, outcome)) is not None}
    own = [index for index, group in enumerate(groups) if group.backend.is_own_tcp]
    best = []
    for case in cases if len(own) > 1 else ():
        # One that failed on the way has fewer repetitions, and nothing that ours could be paired with.
        repetitions = {index: len(outcome.timings[case, index]) for index in own if (case, index) in rows}
        whole = [(case, index) for index, count in repetitions.items() if count == max(repetitions.values())]
        if whole:
            place = min(whole, key=lambda place: rows[place].time_us)
            best.append(BestTuned(rows[place], ratios.get(place)))
    return Results(list(rows.values()), list(ratios.values()), best)


def _row(place: tuple[Case, int], groups: Sequence[Group], outcome: RunOutcome, ranks: int) -> Measurement:
    """A backend that failed keeps what it had measured: a wrong network is found before the first measurement."""
    case, index = place
    timings = outcome.timings[place]
    iterations = outcome.iterations[case]
    gigabytes = link_bytes(case.collective, case.bytes, ranks) * iterations / 1e9
    cpu = sorted(timing.cpu_seconds for timing in timings)[len(timings) // 2]
    return Measurement.from_samples(
        backend=groups[index].backend.name,
        collective=case.collective,
        size_bytes=case.bytes,
        ranks=ranks,
        iterations=iterations,
        repetition_seconds=[timing.seconds for timing in timings],
        iteration_seconds=[value for timing in timings for value in timing.single_seconds],
        cpu_s_per_gb=cpu / gigabytes if case.bytes >= _CPU_FROM_BYTES else None,
        verified=outcome.verified.get(place),
        note="" if groups[index].failure is None else "failed later, see errors",
    )


def _ratio(place: tuple[Case, int], groups: Sequence[Group], outcome: RunOutcome) -> Ratio | None:
    case, index = place
    ours = next((number for number, group in enumerate(groups) if group.backend.is_ours), index)
    mine, theirs = outcome.timings.get((case, ours), []), outcome.timings[place]
    if ours == index or len(mine) != len(theirs):
        return None
    speedup = paired_ratio([timing.seconds for timing in theirs], [timing.seconds for timing in mine])
    return Ratio(case, groups[index].backend.name, speedup)
