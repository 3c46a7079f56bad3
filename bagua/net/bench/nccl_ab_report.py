"""From timings to rows, and from rows to what a person reads: one line a size, one column a contender, and the ratio
of our plugin to NCCL's default taken within each repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.nccl_ab_group import Group
from bagua.net.bench.nccl_ab_plan import Case, link_bytes
from bagua.net.bench.nccl_ab_run import RunOutcome
from bagua.net.bench.sizes import format_size
from bagua.net.bench.summary import SMALL_BYTES, PairedRatio, paired_ratio
from bagua.net.bench.table import BOLD, DIM, LOUD, MISSING, RESET, format_bandwidth, format_time_us

# Below this a figure per GB says how long Python takes to launch, not what the network costs.
_CPU_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Ratio:
    """Our time against another contender's at one case; above 1 we are faster."""

    case: Case
    baseline: str
    speedup: PairedRatio

    def as_dict(self) -> dict[str, object]:
        return {
            "collective": self.case.collective,
            "bytes": self.case.bytes,
            "baseline": self.baseline,
            "speedup": self.speedup.median,
            "speedup_low": self.speedup.low,
            "speedup_high": self.speedup.high,
        }


def measurements(cases: Sequence[Case], groups: Sequence[Group], outcome: RunOutcome, ranks: int) -> list[Measurement]:
    """One that failed keeps what it had measured: a wrong network is found before the first measurement."""
    rows = []
    for case in cases:
        for index, group in enumerate(groups):
            timings = outcome.timings.get((case, index))
            if not timings:
                continue
            iterations = outcome.iterations[case]
            gigabytes = link_bytes(case.collective, case.bytes, ranks) * iterations / 1e9
            cpu = sorted(timing.cpu_seconds for timing in timings)[len(timings) // 2]
            rows.append(
                Measurement.from_samples(
                    contender=group.contender.name,
                    collective=case.collective,
                    size_bytes=case.bytes,
                    ranks=ranks,
                    iterations=iterations,
                    repetition_seconds=[timing.seconds for timing in timings],
                    iteration_seconds=[value for timing in timings for value in timing.single_seconds],
                    cpu_s_per_gb=cpu / gigabytes if case.bytes >= _CPU_FROM_BYTES else None,
                    verified=outcome.verified.get((case, index)),
                    note="" if group.failure is None else "failed later, see errors",
                )
            )
    return rows


def ratios(cases: Sequence[Case], groups: Sequence[Group], outcome: RunOutcome) -> list[Ratio]:
    ours = next((index for index, group in enumerate(groups) if group.contender.is_ours), None)
    if ours is None:
        return []
    found = []
    for case in cases:
        mine = outcome.timings.get((case, ours), [])
        for index, group in enumerate(groups):
            theirs = outcome.timings.get((case, index), [])
            if index == ours or not mine or len(mine) != len(theirs):
                continue
            speedup = paired_ratio([timing.seconds for timing in theirs], [timing.seconds for timing in mine])
            found.append(Ratio(case, group.contender.name, speedup))
    return found


def render_tables(
    rows: Sequence[Measurement], found_ratios: Sequence[Ratio], contenders: Sequence[str], *, colour: bool = False
) -> str:
    """A table for each collective: time in us, busbw in GB/s in brackets; the last column is the speed-up over the
    first contender."""
    collectives = dict.fromkeys(row.collective for row in rows)
    return "\n".join(_render_one(collective, rows, found_ratios, contenders, colour) for collective in collectives)


def _render_one(
    collective: str, rows: Sequence[Measurement], found_ratios: Sequence[Ratio], contenders: Sequence[str], colour: bool
) -> str:
    mine = [row for row in rows if row.collective == collective]
    shown = [name for name in contenders if any(row.contender == name for row in mine)]
    by_place = {(row.bytes, row.contender): row for row in mine}
    speedups = {
        ratio.case.bytes: ratio.speedup
        for ratio in found_ratios
        if ratio.case.collective == collective and ratio.baseline == contenders[0]
    }
    grid = [["size", *shown, f"bagua-net / {contenders[0]}", "verified"]]
    if not speedups:
        del grid[0][-2]
    wrong_lines = set()
    for size in dict.fromkeys(row.bytes for row in mine):
        cells = [by_place.get((size, name)) for name in shown]
        line = [format_size(size), *(_cell(cell) for cell in cells)]
        if speedups:
            line.append(f"{speedups[size].median:.2f}x" if size in speedups else MISSING)
        states = {cell.verified for cell in cells if cell is not None}
        if False in states:
            wrong_lines.add(len(grid))
        line.append("NO" if False in states else "yes" if states == {True} else MISSING)
        grid.append(line)
    widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
    title = f"{collective}: time in us (busbw in GB/s), median over repetitions"
    lines = [f"{BOLD}{title}{RESET}" if colour else title]
    for number, line in enumerate(grid):
        text = "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        if colour and number == 0:
            text = f"{DIM}{text}{RESET}"
        elif colour and number in wrong_lines:
            text = f"{LOUD}{text}{RESET}"
        lines.append(text)
    return "\n".join(lines) + "\n"


def _cell(row: Measurement | None) -> str:
    return MISSING if row is None else f"{format_time_us(row.time_us)} ({format_bandwidth(row.busbw_gb_s)})"


def render_closing(
    groups: Sequence[Group], found_ratios: Sequence[Ratio], outcome: RunOutcome, notes: Sequence[str]
) -> str:
    """Proof of each contender's network, our speed-up at the ends of the range, and everything that went wrong."""
    lines = []
    for group in groups:
        if group.proofs:
            kinds = dict.fromkeys(proof.summary() for proof in group.proofs)
            lines.append(f"network of {group.contender.name}: " + "; ".join(kinds))
        if group.contender.is_ours:
            lines += [f"  log: {text}" for text in (group.proofs[0].plugin_lines if group.proofs else ())[:4]]
        lines += [f"  NCCL warned: {text}" for proof in group.proofs[:1] for text in proof.warnings[:4]]
    for collective in dict.fromkeys(ratio.case.collective for ratio in found_ratios):
        for baseline in dict.fromkeys(ratio.baseline for ratio in found_ratios):
            ends = [r for r in found_ratios if r.case.collective == collective and r.baseline == baseline]
            if ends:
                small = next((ratio for ratio in ends if ratio.case.bytes >= SMALL_BYTES), ends[0])
                wanted = dict.fromkeys((small, ends[-1]))
                at = ", ".join(f"{ratio.speedup} at {format_size(ratio.case.bytes)}" for ratio in wanted)
                lines.append(f"{collective}, bagua-net over {baseline}: {at}")
    lines += [f"note: {note}" for note in notes]
    if outcome.stopped_early:
        lines.append(f"note: {outcome.stopped_early}; sizes and repetitions after that are missing")
    lines += [f"ERROR: {error}" for error in outcome.errors]
    return "\n".join(lines) + "\n"
