"""What is printed: one table of all rows, and what the verdicts add up to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.net.bench.figures import result_of
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.result_file import Figure, ResultFile
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import BOLD, LOUD, MISSING, RESET, format_time_us

from .base_commit import BaseCommit, WorkingTree
from .rounds import Rows, RowSamples
from .verdict import ERROR_CHANCE, FLOOR, MIN_ROUNDS, Judgement, Verdict, judge

_TIME_WORDS = {Verdict.LESS: "faster", Verdict.SAME: "same", Verdict.MORE: "slower"}
_CPU_WORDS = {Verdict.LESS: "less CPU", Verdict.SAME: "", Verdict.MORE: "more CPU"}
# An idle machine resolves a few percent.
_NOISY = 0.1
_HEAD = ("channels", "size", "base us", "tree us", "time ratio", "spread", "CPU ratio", "spread", "vs bare", "verdict")


@dataclass(frozen=True)
class Row:
    channels: int
    bytes: int
    rounds: int
    base_us: float
    tree_us: float
    time: Judgement
    cpu: Judgement | None  # None: the kernel counted no CPU time
    over_bare: float

    @staticmethod
    def of(channels: int, size_bytes: int, samples: RowSamples) -> Row:
        complete = len(samples.cpu_ratios) == len(samples.time_ratios)
        return Row(
            channels,
            size_bytes,
            len(samples.time_ratios),
            statistics.median(samples.base_us),
            statistics.median(samples.tree_us),
            judge(samples.time_ratios),
            judge(samples.cpu_ratios) if complete else None,
            statistics.median(samples.over_bare),
        )

    @property
    def verdict(self) -> str:
        cpu = "" if self.cpu is None else _CPU_WORDS[self.cpu.verdict]
        return ", ".join(word for word in (_TIME_WORDS[self.time.verdict], cpu) if word)

    @property
    def is_worse(self) -> bool:
        return Verdict.MORE in (self.time.verdict, None if self.cpu is None else self.cpu.verdict)

    @property
    def title(self) -> str:
        return f"{format_size(self.bytes)} over {self.channels} channels"

    def figures(self) -> list[Figure]:
        case = {"channels": self.channels, "size_bytes": self.bytes, "baseline": "base"}
        found = [Figure({**case, "verdict": self.verdict}, "time_ratio", "x", *self.time.spread, self.rounds)]
        if self.cpu is not None:
            found.append(Figure(case, "cpu_ratio", "x", *self.cpu.spread, self.rounds))
        for metric, unit, value in (("time", "us", self.tree_us), ("base_time", "us", self.base_us)):
            found.append(Figure(case, metric, unit, value, repetitions=self.rounds))
        bare = {**case, "baseline": "bare"}
        return [*found, Figure(bare, "time_ratio", "x", self.over_bare, repetitions=(self.rounds + 1) // 2)]


def result_of_comparison(rows: Sequence[Row], base: BaseCommit, tree: WorkingTree, machine: MachineFacts) -> ResultFile:
    """Of the tree; `low` and `high` are the ends of the spread."""
    parameters = {"base": base.sha, "base_name": base.name, "tree": tree.sha, "uncommitted_changes": tree.is_changed}
    found = [figure for row in rows for figure in row.figures()]
    return result_of(f"The plugin against {base.name}", found, machine=machine, parameters=parameters)


def judged(rows: Rows) -> list[Row]:
    return [
        Row.of(channels, size, samples)
        for (channels, size), samples in rows.items()
        if len(samples.time_ratios) >= MIN_ROUNDS
    ]


def render_table(rows: Sequence[Row], *, colour: bool = False) -> str:
    """Aligned; a blank line between the parts."""
    grid = [list(_HEAD), *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in grid) for column in range(len(_HEAD))]
    lines = []
    for number, cells in enumerate(grid):
        # The verdict is words, the rest figures.
        parts = [cell.rjust(width) for cell, width in zip(cells[:-1], widths[:-1], strict=True)]
        text = "  ".join([*parts, cells[-1]]).rstrip()
        if number == 0:
            text = f"{BOLD}{text}{RESET}" if colour else text
        else:
            row = rows[number - 1]
            if number > 1 and rows[number - 2].channels != row.channels:
                lines.append("")
            text = f"{LOUD}{text}{RESET}" if colour and row.is_worse else text
        lines.append(text)
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    cpu = [MISSING, MISSING] if row.cpu is None else _ratio_cells(row.cpu)
    times = [format_time_us(row.base_us), format_time_us(row.tree_us)]
    head = [str(row.channels), format_size(row.bytes), *times]
    return [*head, *_ratio_cells(row.time), *cpu, f"{row.over_bare:.2f}", row.verdict]


def _ratio_cells(judgement: Judgement) -> list[str]:
    return [f"{judgement.ratio:.3f}", f"{judgement.low:.3f}..{judgement.high:.3f}"]


def render_closing(rows: Sequence[Row]) -> str:
    if not rows:
        return f"verdict: none, no size was measured in {MIN_ROUNDS} rounds; give more --seconds\n"
    seen = [row.time.resolution for row in rows]
    best, typical, worst = min(seen), statistics.median(seen), max(seen)
    lines = [
        f"ratio: tree over base, below 1 the tree is better; the median of {rows[0].rounds} rounds of fresh processes",
        f"spread: holds the true median but for a chance of {ERROR_CHANCE:.1%}",
        f"same: the spread straddles 1, or the ratio is within {FLOOR:.0%} of 1",
        f"resolution: in the typical row changes of time above {typical:.1%} are seen ({best:.1%}..{worst:.1%})",
    ]
    if typical > _NOISY:
        lines.append("note: that is much, so the machine is busy or noisy; repeat this where nothing else runs")
    for word in ("faster", "less CPU", "slower", "more CPU"):
        found = [row.title for row in rows if word in row.verdict.split(", ")]
        if found:
            lines.append(f"{word}: {len(found)} of {len(rows)} rows: {', '.join(found)}")
    if all(row.verdict == "same" for row in rows):
        lines.append(f"verdict: all {len(rows)} rows are the same")
    return "\n".join(lines) + "\n"
