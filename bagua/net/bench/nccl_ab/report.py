"""From timings to figures, to what a person reads, and to --json and --csv.

A row is a backend and case. Ratios of our plugin to the others, and to the best of NCCL's own settings, are taken
within each repetition. With many backends a table of all of them is wider than a terminal and hides what is asked:
NCCL's hand-tuned settings then stand in one column, the best of each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Case, Measurement
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.options import NcclOptions
from bagua.net.bench.nccl_ab.session import NcclSession
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.result_file import (
    Figure,
    Label,
    measurement_case,
    measurement_figures,
    result_of,
    speedup,
    write_files,
)
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import BOLD, MISSING, RESET, Column, format_bandwidth, format_time_us, render_rows
from bagua.net.bench.verdict import SMALL_BYTES, PairedRatio, paired_ratio

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


def results_of(run: PacedRun, sessions: Sequence[NcclSession], ranks: int) -> Results:
    names = [session.name for session in sessions]
    ours = next((session.name for session in sessions if session.backend.is_ours), None)
    places = [(case, name) for case in run.turn_plans for name in names if run.turns.of(case, name)]
    failed = {session.name for session in sessions if not session.is_alive}
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
    own = [session.name for session in sessions if session.backend.is_own_tcp]
    best = []
    for case in run.turn_plans if len(own) > 1 else ():
        # One that failed on the way has fewer repetitions, and nothing that ours could be paired with.
        repetitions = {name: rows[case, name].repetitions for name in own if (case, name) in rows}
        whole = [(case, name) for name, count in repetitions.items() if count == max(repetitions.values())]
        if whole:
            place = min(whole, key=lambda place: rows[place].time_us)
            best.append(BestTuned(rows[place], ratios.get(place)))
    return Results(list(rows.values()), list(ratios.values()), best)


# Up to so many, every backend has a column.
MAX_COLUMNS = 4


def has_envelope(backends: Sequence[Backend], *, all_columns: bool = False) -> bool:
    """Whether the best of the hand-tuned settings stands for all of them in the table."""
    return not all_columns and len(backends) > MAX_COLUMNS and len(hand_tuned_names(backends)) > 1


def hand_tuned_names(backends: Sequence[Backend]) -> list[str]:
    """NCCL's own settings but the first backend, which is its default."""
    return [backend.name for backend in backends[1:] if backend.is_own_tcp]


def render_tables(
    results: Results, backends: Sequence[Backend], *, all_columns: bool = False, colour: bool = False
) -> str:
    """Times in us, busbw in GB/s in brackets; speed-ups of our plugin are medians of the ratios within a repetition."""
    collectives = dict.fromkeys(row.collective for row in results.rows)
    return "\n".join(_render_one(collective, results, backends, all_columns, colour) for collective in collectives)


def _render_one(collective: str, results: Results, backends: Sequence[Backend], all_columns: bool, colour: bool) -> str:
    rows = {(row.bytes, row.backend): row for row in results.rows if row.collective == collective}
    sizes = list(dict.fromkeys(size for size, _ in rows))
    columns: list[Column[int]] = [Column("size", "", format_size)]
    columns += _columns(collective, results, backends, rows, all_columns)
    states = {size: {row.verified for (at, _), row in rows.items() if at == size} for size in sizes}
    columns.append(Column("verified", "", lambda size: _verified(states[size])))
    title = f"{collective}: time in us (busbw in GB/s), median over repetitions"
    table = render_rows(sizes, columns, is_loud=lambda size: False in states[size], colour=colour)
    return f"{BOLD}{title}{RESET}\n{table}" if colour else f"{title}\n{table}"


def _columns(
    collective: str,
    results: Results,
    backends: Sequence[Backend],
    rows: Mapping[tuple[int, str], Measurement],
    all_columns: bool,
) -> list[Column[int]]:
    best = results.best_of(collective)
    envelope = has_envelope(backends, all_columns=all_columns)
    hidden = hand_tuned_names(backends) if envelope else []
    measured = {name for _, name in rows}
    columns = [
        _backend_column(backend.name, rows)
        for backend in backends
        if backend.name in measured and backend.name not in hidden
    ]
    if best and envelope:
        columns.insert(1, Column(BEST_TUNED_NAME, "", lambda size: _best_figures(best.get(size))))
    elif best:
        columns.append(Column(BEST_TUNED_NAME, "", lambda size: best[size].setting if size in best else MISSING))
    for title, baseline in (("over default", backends[0].name), ("over best", BEST_TUNED_NAME)):
        if ratios := results.ratios_to(baseline, collective):
            columns.append(_speedup_column(title, ratios))
    return columns


def _backend_column(name: str, rows: Mapping[tuple[int, str], Measurement]) -> Column[int]:
    return Column(name, "", lambda size: _time_and_busbw(rows.get((size, name))))


def _speedup_column(title: str, ratios: Sequence[Ratio]) -> Column[int]:
    by_size = {ratio.case.bytes: f"{ratio.speedup.median:.2f}x" for ratio in ratios}
    return Column(title, "", lambda size: by_size.get(size, MISSING))


def _time_and_busbw(row: Measurement | None) -> str:
    return MISSING if row is None else f"{format_time_us(row.time_us)} ({format_bandwidth(row.busbw_gb_s)})"


def _best_figures(best: BestTuned | None) -> str:
    return MISSING if best is None else f"{_time_and_busbw(best.row)} {best.setting}"


def _verified(states: set[bool | None]) -> str:
    return "NO" if False in states else "yes" if states == {True} else MISSING


def render_closing(
    sessions: Sequence[NcclSession],
    results: Results,
    notes: Sequence[str],
    errors: Sequence[str],
    *,
    all_columns: bool = False,
) -> str:
    """Proof of each backend's network, our speed-ups, where we are slower, and everything that went wrong."""
    lines = []
    for session in sessions:
        if session.proofs:
            kinds = dict.fromkeys(proof.summary() for proof in session.proofs)
            lines.append(f"network of {session.backend.name}: " + "; ".join(kinds))
        if session.backend.is_ours:
            lines += [f"  log: {text}" for text in (session.proofs[0].plugin_lines if session.proofs else ())[:4]]
        lines += [f"  NCCL warned: {text}" for proof in session.proofs[:1] for text in proof.warnings[:4]]
    backends = [session.backend for session in sessions]
    hidden = hand_tuned_names(backends) if has_envelope(backends, all_columns=all_columns) else []
    baselines = [backend.name for backend in backends if backend.name not in hidden]
    if results.best:
        baselines.insert(1, BEST_TUNED_NAME)
    for collective in dict.fromkeys(ratio.case.collective for ratio in results.ratios):
        for baseline in baselines:
            if found := results.ratios_to(baseline, collective):
                lines.append(f"{collective}, bagua-net over {baseline}: {_at_the_ends(found)}")
        for baseline in dict.fromkeys((backends[0].name, *(name for name in baselines if name == BEST_TUNED_NAME))):
            lines += _where_slower(collective, baseline, results)
    lines += [f"note: {note}" for note in notes]
    lines += [f"ERROR: {error}" for error in errors]
    return "\n".join(lines) + "\n"


def _at_the_ends(ratios: Sequence[Ratio]) -> str:
    small = next((ratio for ratio in ratios if ratio.case.bytes >= SMALL_BYTES), ratios[0])
    wanted = dict.fromkeys((small, ratios[-1]))
    return ", ".join(f"{ratio.speedup} at {format_size(ratio.case.bytes)}" for ratio in wanted)


def _where_slower(collective: str, baseline: str, results: Results) -> list[str]:
    ratios = results.ratios_to(baseline, collective)
    slower = [ratio for ratio in ratios if ratio.is_slower]
    if not ratios:
        return []
    count = f"{len(ratios) - len(slower)} of {len(ratios)} sizes"
    head = f"{collective}, bagua-net no more than {NOISE:.0%} slower than {baseline}: {count}"
    return [head + ("; slower:" if slower else ""), *(f"  {_slower_at(ratio)}" for ratio in slower)]


def _slower_at(ratio: Ratio) -> str:
    return f"{format_size(ratio.case.bytes)}: {ratio.speedup} over {ratio.baseline}"


def write_outputs(
    options: NcclOptions,
    results: Results,
    sessions: Sequence[NcclSession],
    machine: MachineFacts,
    *,
    parameters: Mapping[str, object],
    notes: Sequence[str],
    errors: Sequence[str],
    device: str,
    ranks: int,
    gpus: int,
    setting: str,
) -> list[Path]:
    """The files that were written."""
    networks = {session.backend.name: [proof.as_dict() for proof in session.proofs] for session in sessions}
    result = result_of(
        f"NCCL with and without the plugin: {setting}",
        _figures(results, ranks, gpus),
        machine=machine,
        parameters={**parameters, "networks": networks},
        versions={name: parameters.get(name) for name in ("torch", "nccl")},
        gpu=device if gpus else None,
        notes=[*notes, *(f"ERROR: {error}" for error in errors)],
    )
    return write_files(result, options.json_path, options.csv_path)


def _figures(results: Results, ranks: int, gpus: int) -> list[Figure]:
    found = [
        one for row in results.rows for one in measurement_figures(row, measurement_case(row, ranks=ranks, gpus=gpus))
    ]

    def add(ratio: Ratio, baseline: str) -> None:
        labels: dict[str, Label] = {
            "collective": ratio.case.collective,
            "size_bytes": ratio.case.bytes,
            "ranks": ranks,
            "gpus": gpus,
        }
        found.append(speedup(labels, "bagua-net", baseline, ratio.speedup))

    for ratio in results.ratios:
        add(ratio, ratio.baseline)
    for best in results.best:
        row = replace(best.row, backend=BEST_TUNED_NAME)
        case = measurement_case(row, ranks=ranks, gpus=gpus, setting=best.setting)
        found += measurement_figures(row, case)
        if best.ratio is not None:
            add(best.ratio, BEST_TUNED_NAME)
    return found
