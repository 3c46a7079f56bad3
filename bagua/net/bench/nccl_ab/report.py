"""What a person reads: a table for each collective, a line a size, and the closing lines.

With many backends a table of all of them is wider than a terminal and hides what is asked: NCCL's hand-tuned settings
then stand in one column, the best of each size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME, NOISE, BestTuned, Ratio, Results
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import BOLD, MISSING, RESET, Column, format_bandwidth, format_time_us, render_rows
from bagua.net.bench.verdict import SMALL_BYTES

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
    return Column(name, "", lambda size: _figures(rows.get((size, name))))


def _speedup_column(title: str, ratios: Sequence[Ratio]) -> Column[int]:
    by_size = {ratio.case.bytes: f"{ratio.speedup.median:.2f}x" for ratio in ratios}
    return Column(title, "", lambda size: by_size.get(size, MISSING))


def _figures(row: Measurement | None) -> str:
    return MISSING if row is None else f"{format_time_us(row.time_us)} ({format_bandwidth(row.busbw_gb_s)})"


def _best_figures(best: BestTuned | None) -> str:
    return MISSING if best is None else f"{_figures(best.row)} {best.setting}"


def _verified(states: set[bool | None]) -> str:
    return "NO" if False in states else "yes" if states == {True} else MISSING


def render_closing(
    groups: Sequence[Group],
    results: Results,
    notes: Sequence[str],
    errors: Sequence[str],
    *,
    all_columns: bool = False,
) -> str:
    """Proof of each backend's network, our speed-ups, where we are slower, and everything that went wrong."""
    lines = []
    for group in groups:
        if group.proofs:
            kinds = dict.fromkeys(proof.summary() for proof in group.proofs)
            lines.append(f"network of {group.backend.name}: " + "; ".join(kinds))
        if group.backend.is_ours:
            lines += [f"  log: {text}" for text in (group.proofs[0].plugin_lines if group.proofs else ())[:4]]
        lines += [f"  NCCL warned: {text}" for proof in group.proofs[:1] for text in proof.warnings[:4]]
    backends = [group.backend for group in groups]
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
