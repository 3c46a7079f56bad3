"""What is printed: one table of all rows, and what the verdicts add up to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.net.bench.api import (
    MISSING,
    Column,
    Figure,
    MachineFacts,
    PairedRatio,
    ResultFile,
    Verdict,
    format_size,
    format_time_us,
    ratio_of,
    render_rows,
    result_of,
)

from .base_commit import BaseCommit, WorkingTree
from .rounds import ERROR_CHANCE, MIN_ROUNDS, Rows, RowSamples

# Changes up to this are not called, however steady: the same code at another place in memory can differ by as much.
FLOOR = 0.01
_TIME_WORDS = {Verdict.LESS: "faster", Verdict.SAME: "same", Verdict.MORE: "slower"}
_CPU_WORDS = {Verdict.LESS: "less CPU", Verdict.SAME: "", Verdict.MORE: "more CPU"}
# An idle machine resolves a few percent.
_NOISY = 0.1


@dataclass(frozen=True)
class Row:
    place: str
    channels: int
    bytes: int
    rounds: int
    base_us: float
    tree_us: float
    time: PairedRatio  # of tree over base; above 1 the tree takes more
    cpu: PairedRatio | None  # None: the kernel counted no CPU time
    over_bare: float

    @staticmethod
    def of(place: str, channels: int, size_bytes: int, samples: RowSamples) -> Row:
        complete = len(samples.cpu_ratios) == len(samples.time_ratios)
        return Row(
            place,
            channels,
            size_bytes,
            len(samples.time_ratios),
            statistics.median(samples.base_us),
            statistics.median(samples.tree_us),
            ratio_of(samples.time_ratios, ERROR_CHANCE),
            ratio_of(samples.cpu_ratios, ERROR_CHANCE) if complete else None,
            statistics.median(samples.over_bare),
        )

    @property
    def verdict(self) -> str:
        cpu = "" if self.cpu is None else _CPU_WORDS[self.cpu.verdict(floor=FLOOR)]
        return ", ".join(word for word in (_TIME_WORDS[self.time.verdict(floor=FLOOR)], cpu) if word)

    @property
    def is_worse(self) -> bool:
        return any(one is not None and one.verdict(floor=FLOOR) is Verdict.MORE for one in (self.time, self.cpu))

    @property
    def resolution(self) -> float:
        """The smallest change of time that such a spread would have shown, as a share."""
        return max(self.time.high / self.time.median - 1, self.time.median / self.time.low - 1, FLOOR)

    @property
    def title(self) -> str:
        return f"{format_size(self.bytes)} over {self.channels} channels ({self.place})"

    def figures(self) -> list[Figure]:
        case = {"network": self.place, "channels": self.channels, "size_bytes": self.bytes, "baseline": "base"}
        found = [Figure({**case, "verdict": self.verdict}, "time_ratio", "x", *_spread(self.time), self.rounds)]
        if self.cpu is not None:
            found.append(Figure(case, "cpu_ratio", "x", *_spread(self.cpu), self.rounds))
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
        Row.of(place, channels, size, samples)
        for (place, channels, size), samples in rows.items()
        if len(samples.time_ratios) >= MIN_ROUNDS
    ]


def _spread(ratio: PairedRatio) -> tuple[float, float, float]:
    return ratio.median, ratio.low, ratio.high


def _range(ratio: PairedRatio | None) -> str:
    return MISSING if ratio is None else f"{ratio.low:.3f}..{ratio.high:.3f}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("network", "", lambda row: row.place),
    Column("channels", "", lambda row: str(row.channels)),
    Column("size", "", lambda row: format_size(row.bytes)),
    Column("base", "us", lambda row: format_time_us(row.base_us)),
    Column("tree", "us", lambda row: format_time_us(row.tree_us)),
    Column("time", "ratio", lambda row: f"{row.time.median:.3f}"),
    Column("spread", "", lambda row: _range(row.time)),
    Column("CPU", "ratio", lambda row: MISSING if row.cpu is None else f"{row.cpu.median:.3f}"),
    Column("spread", "", lambda row: _range(row.cpu)),
    Column("vs bare", "", lambda row: f"{row.over_bare:.2f}"),
    Column("verdict", "", lambda row: row.verdict, left=True),
)


def render_table(rows: Sequence[Row], *, colour: bool = False) -> str:
    """A blank line is between the parts."""
    return render_rows(
        rows,
        COLUMNS,
        begins_block=lambda before, row: (before.place, before.channels) != (row.place, row.channels),
        is_loud=lambda row: row.is_worse,
        colour=colour,
    )


def render_closing(rows: Sequence[Row]) -> str:
    if not rows:
        return f"verdict: none, no size was measured in {MIN_ROUNDS} rounds; give more --seconds\n"
    seen = [row.resolution for row in rows]
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
