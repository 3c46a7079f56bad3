"""From timings to figures, to what a person reads, and to --json and --csv.

A row is a backend and case. Ratios of our plugin to the others, and to the best of NCCL's own settings, are taken
within each repetition. With many backends a table of all of them is wider than a terminal and hides what is asked:
NCCL's hand-tuned settings then stand in one column, the best of each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bagua.net.bench.measurement import Case, Measurement
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.session import NcclSession
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.result_file import Figure, Label, measurement_case, measurement_figures, speedup
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import BOLD, MISSING, RESET, Column, format_bandwidth, format_time_us, render_rows
from bagua.net.bench.verdict import SMALL_BYTES, PairedRatio, paired_ratio

BEST_TUNED_NAME = "best tuned"

# What repeating the same measurement may differ by: "slower" below means slower by more.
NOISE = 0.03
# Below this a figure per GB says how long Python takes to launch, not what the network costs.
_CPU_FROM_BYTES = 1 << 20
# Up to so many, every backend has a column.
MAX_COLUMNS = 4


def is_slower(ratio: PairedRatio) -> bool:
    return ratio.median < 1 / (1 + NOISE)


@dataclass(frozen=True)
class Results:
    """
    Attributes:
        rows: By case and backend.
        ratios: Another backend's time against ours: above 1 we are faster. BEST_TUNED_NAME stands for the best.
        best: Of NCCL's own settings the one with the least median time; empty unless two or more of them ran.
    """

    rows: Mapping[tuple[Case, str], Measurement]
    ratios: Mapping[tuple[Case, str], PairedRatio]
    best: Mapping[Case, str]

    @property
    def cases(self) -> list[Case]:
        return list(dict.fromkeys(case for case, _ in self.rows))

    def ratios_to(self, baseline: str, collective: str) -> dict[Case, PairedRatio]:
        found = ((case, self.ratios.get((case, baseline))) for case in self.cases if case.collective == collective)
        return {case: ratio for case, ratio in found if ratio is not None}


def results_of(run: PacedRun, sessions: Sequence[NcclSession], ranks: int) -> Results:
    ours = next((session.name for session in sessions if session.backend.is_ours), None)
    failed = {session.name for session in sessions if not session.is_alive}
    own = [session.name for session in sessions if session.backend.is_own_tcp]
    rows: dict[tuple[Case, str], Measurement] = {}
    ratios: dict[tuple[Case, str], PairedRatio] = {}
    best: dict[Case, str] = {}
    for case in run.turn_plans:
        for name in [session.name for session in sessions if run.turns.of(case, session.name)]:
            rows[case, name] = Measurement(
                name,
                case.collective,
                case.bytes,
                ranks,
                run.turns.of(case, name),
                cpu_from_bytes=_CPU_FROM_BYTES,
                verified=run.verified.get((case, name)),
                note="failed later, see the end of the report" if name in failed else "",
            )
            if name != ours and ours is not None and (pairs := run.turns.pairs(case, name, ours)):
                times = [other.seconds for other, _ in pairs], [mine.seconds for _, mine in pairs]
                ratios[case, name] = paired_ratio(*times)
        # One that failed on the way has fewer repetitions, and nothing that ours could be paired with.
        counts = {name: rows[case, name].repetitions for name in own if (case, name) in rows}
        whole = [name for name, count in counts.items() if count == max(counts.values())]
        if whole and len(own) > 1:
            best[case] = min(whole, key=lambda name: rows[case, name].time_us)
            if (case, best[case]) in ratios:
                ratios[case, BEST_TUNED_NAME] = ratios[case, best[case]]
    return Results(rows, ratios, best)


def setting_of(name: str) -> str:
    """For a table that says NCCL already: "t2s2 8ch", "default"."""
    return name.removeprefix("NCCL ")


def hidden_names(backends: Sequence[Backend], *, all_columns: bool = False) -> list[str]:
    """NCCL's own settings but the first backend, which is its default, if the best of them stands for them all."""
    tuned = [backend.name for backend in backends[1:] if backend.is_own_tcp]
    return tuned if not all_columns and len(backends) > MAX_COLUMNS and len(tuned) > 1 else []


def render_tables(
    results: Results, backends: Sequence[Backend], *, all_columns: bool = False, colour: bool = False
) -> str:
    """Times in us, busbw in GB/s in brackets; speed-ups of our plugin are medians of the ratios within a repetition."""
    collectives = dict.fromkeys(case.collective for case in results.cases)
    return "\n".join(_render_one(collective, results, backends, all_columns, colour) for collective in collectives)


def _render_one(collective: str, results: Results, backends: Sequence[Backend], all_columns: bool, colour: bool) -> str:
    cases = [case for case in results.cases if case.collective == collective]
    hidden = hidden_names(backends, all_columns=all_columns)
    states = {case: {row.verified for (of, _), row in results.rows.items() if of == case} for case in cases}

    def times(name: str) -> Column[Case]:
        return Column(name, "", lambda case: _time_and_busbw(results.rows.get((case, name))))

    def best(case: Case) -> str:
        name = results.best.get(case)
        return MISSING if name is None else f"{_time_and_busbw(results.rows[case, name])} {setting_of(name)}"

    measured = {name for case, name in results.rows if case.collective == collective}
    columns = [times(one.name) for one in backends if one.name in measured and one.name not in hidden]
    if results.best and hidden:
        columns.insert(1, Column(BEST_TUNED_NAME, "", best))
    elif results.best:
        columns.append(Column(BEST_TUNED_NAME, "", lambda case: setting_of(results.best.get(case, MISSING))))
    for title, baseline in (("over default", backends[0].name), ("over best", BEST_TUNED_NAME)):
        if ratios := results.ratios_to(baseline, collective):
            told = {case: f"{ratios[case].median:.2f}x" if case in ratios else MISSING for case in cases}
            columns.append(Column(title, "", told.__getitem__))
    columns.insert(0, Column("size", "", lambda case: format_size(case.bytes)))
    verified = {case: "NO" if False in of else "yes" if of == {True} else MISSING for case, of in states.items()}
    columns.append(Column("verified", "", verified.__getitem__))
    title = f"{collective}: time in us (busbw in GB/s), median over repetitions"
    table = render_rows(cases, columns, is_loud=lambda case: False in states[case], colour=colour)
    return f"{BOLD}{title}{RESET}\n{table}" if colour else f"{title}\n{table}"


def _time_and_busbw(row: Measurement | None) -> str:
    return MISSING if row is None else f"{format_time_us(row.time_us)} ({format_bandwidth(row.busbw_gb_s)})"


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
    hidden = hidden_names(backends, all_columns=all_columns)
    baselines = [backend.name for backend in backends if backend.name not in hidden]
    if results.best:
        baselines.insert(1, BEST_TUNED_NAME)
    for collective in dict.fromkeys(case.collective for case, _ in results.ratios):
        found = {baseline: results.ratios_to(baseline, collective) for baseline in baselines}
        for baseline, ratios in found.items():
            if ratios:
                lines.append(f"{collective}, bagua-net over {baseline}: {_at_the_ends(ratios)}")
        for baseline in (backends[0].name, BEST_TUNED_NAME):
            if slower := found.get(baseline):
                lines += _where_slower(collective, baseline, slower, results)
    lines += [f"note: {note}" for note in notes]
    lines += [f"ERROR: {error}" for error in errors]
    return "\n".join(lines) + "\n"


def _at_the_ends(ratios: Mapping[Case, PairedRatio]) -> str:
    cases = list(ratios)
    small = next((case for case in cases if case.bytes >= SMALL_BYTES), cases[0])
    return ", ".join(f"{ratios[case]} at {format_size(case.bytes)}" for case in dict.fromkeys((small, cases[-1])))


def _where_slower(collective: str, baseline: str, ratios: Mapping[Case, PairedRatio], results: Results) -> list[str]:
    slower = [case for case, ratio in ratios.items() if is_slower(ratio)]
    count = f"{len(ratios) - len(slower)} of {len(ratios)} sizes"
    head = f"{collective}, bagua-net no more than {NOISE:.0%} slower than {baseline}: {count}"
    best = {case: results.best[case] if baseline == BEST_TUNED_NAME else baseline for case in slower}
    lines = [f"  {format_size(case.bytes)}: {ratios[case]} over {best[case]}" for case in slower]
    return [head + ("; slower:" if slower else ""), *lines]


def figures_of(results: Results, *, ranks: int, gpus: int) -> list[Figure]:
    where: dict[str, Label] = {"ranks": ranks, "gpus": gpus}
    rows = [(row, measurement_case(row, ranks=ranks, gpus=gpus)) for row in results.rows.values()]
    for case, name in results.best.items():
        row = replace(results.rows[case, name], backend=BEST_TUNED_NAME)
        rows.append((row, measurement_case(row, ranks=ranks, gpus=gpus, setting=setting_of(name))))
    found = [one for row, labels in rows for one in measurement_figures(row, labels)]
    for (case, baseline), ratio in results.ratios.items():
        size: dict[str, Label] = {"collective": case.collective, "size_bytes": case.bytes, **where}
        found.append(speedup(size, "bagua-net", baseline, ratio))
    return found
