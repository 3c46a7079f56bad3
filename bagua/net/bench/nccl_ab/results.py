"""From timings to figures: a row a backend and case, the best of NCCL's own settings for each case, and the ratios of
our plugin to all of them, taken within each repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.sample import Case
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


def results_of(run: PacedRun, groups: Sequence[Group], ranks: int) -> Results:
    names = [group.name for group in groups]
    ours = next((group.name for group in groups if group.backend.is_ours), None)
    places = [(case, name) for case in run.turn_plans for name in names if run.turns.of(case, name)]
    failed = {group.name for group in groups if not group.is_alive}
    rows = {
        (case, name): Measurement.from_samples(
            name,
            case.collective,
            case.bytes,
            ranks,
            run.turns.of(case, name),
            cpu_from_bytes=_CPU_FROM_BYTES,
            verified=run.verified.get((case, name)),
            note="failed later, see the end of the report" if name in failed else "",
        )
        for case, name in places
    }
    ratios = {}
    for case, name in places:
        if name != ours and ours is not None and (pairs := run.turns.pairs(case, name, ours)):
            speedup = paired_ratio([other.seconds for other, _ in pairs], [mine.seconds for _, mine in pairs])
            ratios[case, name] = Ratio(case, name, speedup)
    own = [group.name for group in groups if group.backend.is_own_tcp]
    best = []
    for case in run.turn_plans if len(own) > 1 else ():
        # One that failed on the way has fewer repetitions, and nothing that ours could be paired with.
        repetitions = {name: rows[case, name].repetitions for name in own if (case, name) in rows}
        whole = [(case, name) for name, count in repetitions.items() if count == max(repetitions.values())]
        if whole:
            place = min(whole, key=lambda place: rows[place].time_us)
            best.append(BestTuned(rows[place], ratios.get(place)))
    return Results(list(rows.values()), list(ratios.values()), best)
