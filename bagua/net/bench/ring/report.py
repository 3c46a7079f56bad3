"""What a run prints: the head, the table and the closing block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bagua.net.bench.figures import backend_label, figures, measurement_case, measurement_figures, result_of
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.result_file import Label, ResultFile
from bagua.net.bench.ring.summary import PairedSeries, RawLimit, best_raw_only, comparisons
from bagua.net.bench.table import LOUD, RESET, format_bandwidth, render_table


@dataclass(frozen=True)
class Report:
    """A finished run."""

    title: str
    ranks: int
    machine: MachineFacts
    backends: Mapping[str, str]  # what each one is: library, table, device
    notes: Sequence[str]  # what is missing, and why
    rows: Sequence[Measurement]
    limit: RawLimit | None
    paired: Sequence[PairedSeries]
    wrong: Sequence[str]
    verified: bool  # data was checked at all
    repeats: int
    parameters: Mapping[str, object] = field(default_factory=dict)

    def head(self) -> str:
        lines = [self.title, self.machine.caption(), self.machine.links()]
        width = max((len(name) for name in self.backends), default=0)
        lines += [f"  {name.ljust(width)}  {text}" for name, text in self.backends.items()]
        return "\n".join(lines) + "\n"

    def table(self, *, colour: bool = False) -> str:
        return render_table(best_raw_only(self.rows), colour=colour)

    def closing(self, *, colour: bool = False) -> str:
        lines = []
        if self.limit is not None:
            links = self.limit.links
            sharing = "one ring connection uses" if links == 1 else f"{links} ring connections share"
            lines.append(
                f"raw TCP limit: {format_bandwidth(self.limit.gb_s)} GB/s one way over {self.limit.streams} streams;"
                f" {sharing} it: busbw {format_bandwidth(self.limit.busbw_gb_s)} GB/s"
            )
        lines += [*self.verdicts(), *self.notes]
        if not self.verified:
            lines.append("data: not verified")
        elif self.wrong:
            lines += [f"{LOUD}{text}{RESET}" if colour else text for text in self.wrong]
        else:
            lines.append("data: every byte of every size correct")
        return "\n".join(lines) + "\n"

    @property
    def is_worse(self) -> bool:
        return False

    def verdicts(self) -> list[str]:
        repeats = f"(medians over up to {self.repeats} repetitions of the ratio within each)"
        return [*comparisons(self.paired), *([repeats] if self.paired else [])]

    def result(self) -> ResultFile:
        """For --json and --csv."""
        ranks = self.ranks
        found = [one for row in self.rows for one in measurement_figures(row, measurement_case(row, ranks=ranks))]
        for series in self.paired:
            case: dict[str, Label] = {"collective": "all_reduce", "size_bytes": series.bytes, "ranks": ranks, "gpus": 0}
            labels = {"backend": backend_label(series.backend), "baseline": backend_label(series.baseline), **case}
            found += figures(labels, {("speedup", "x"): [1 / ratio for ratio in series.time]})
            found += figures(labels, {("cpu_ratio", "x"): series.cpu or ()})
        if self.limit is not None:
            raw: dict[str, Label] = {"backend": "raw", "collective": "one_way", "streams": self.limit.streams}
            found += figures(raw, {("limit", "GB/s"): [self.limit.gb_s]})
            found += figures(raw, {("limit_busbw", "GB/s"): [self.limit.busbw_gb_s]})
        return result_of(
            self.title,
            found,
            machine=self.machine,
            parameters={**self.parameters, "backends": dict(self.backends), "verified": self.verified},
            notes=[
                *self.notes,
                *self.wrong,
            ],
        )
