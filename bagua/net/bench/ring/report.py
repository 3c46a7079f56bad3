"""From samples to rows and to what a run prints: the head, the table, and the closing block with the limit, the shares
and the paired ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.driver import RAW
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Case, Measurement, Sample, busbw_factor
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.result_file import (
    Label,
    ResultFile,
    backend_label,
    figures,
    measurement_case,
    measurement_figures,
    result_of,
)
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import LOUD, RESET, format_bandwidth, render_table
from bagua.net.bench.turns import Turns
from bagua.net.bench.verdict import LARGE_BYTES, SMALL_BYTES, PairedRatio, paired_ratio, ratio_of

LONG_TRANSFER_BYTES = 64 << 20


@dataclass(frozen=True)
class RawLimit:
    """The best that plain TCP moved over the measured path."""

    gb_s: float
    streams: int
    # Ring connections that share that path: all W on one host; across hosts those that leave rank 0's host.
    links: int

    @property
    def busbw_gb_s(self) -> float:
        """The busbw at which the ring's connections together reach the limit."""
        return self.gb_s / self.links


def raw_limit(turns: Turns[Sample], links: int) -> RawLimit | None:
    """Of the stream counts the one with the best median rate over all turns of all sizes.

    TCP has no messages, so the sizes are repetitions of one experiment; the best single size is merely lucky.
    """
    best: RawLimit | None = None
    for name in dict.fromkeys(name for _, name in turns.samples if name.startswith(f"{RAW} x")):
        samples = [one for (_, of), rounds in turns.samples.items() if of == name for one in rounds.values()]
        # A short transfer is start and end; it counts only where there is nothing longer.
        long_ones = [one for one in samples if one.moved_bytes >= LONG_TRANSFER_BYTES]
        rate = statistics.median(s.moved_bytes / (s.seconds * s.iterations) for s in long_ones or samples) / 1e9
        if best is None or rate > best.gb_s:
            best = RawLimit(rate, int(name.removeprefix(f"{RAW} x")), links)
    return best


@dataclass(frozen=True)
class PairedSeries:
    """Every repetition's ratio of `backend` over `baseline` at one size."""

    backend: str
    baseline: str
    bytes: int
    busbw: PairedRatio
    # Of p50 up to LATENCY_LIMIT_BYTES, not of means: a mean of 20 us iterations is at the mercy of one preemption of
    # 10 ms; above, of the mean of the turn.
    time: list[float]
    cpu: list[float] | None  # None: the kernel counted none


def paired_series(turns: Turns[Sample], baselines: Sequence[str]) -> list[PairedSeries]:
    """Of the plugin, by baseline, then by size."""
    cases = sorted({case for case, name in turns.samples if name == "plugin"}, key=lambda case: case.bytes)
    found = []
    for baseline in baselines:
        for case in cases:
            if not (pairs := turns.pairs(case, "plugin", baseline)):
                continue
            small = case.wants_latency
            time = [a.typical_seconds / b.typical_seconds if small else a.seconds / b.seconds for a, b in pairs]
            cpu_known = all(sample.cpu_seconds > 0 for pair in pairs for sample in pair)
            cpu = [a.cpu_s_per_gb / b.cpu_s_per_gb for a, b in pairs] if cpu_known else None
            # The same bytes in less time: the ratio of bandwidths is the inverse ratio of times.
            busbw = paired_ratio([b.seconds for _, b in pairs], [a.seconds for a, _ in pairs])
            found.append(PairedSeries("plugin", baseline, case.bytes, busbw, time, cpu))
    return found


def comparisons(paired: Sequence[PairedSeries]) -> list[str]:
    """A line a baseline, at a large and at a small size."""
    lines = []
    for baseline in dict.fromkeys(series.baseline for series in paired):
        by_size = {series.bytes: series for series in paired if series.baseline == baseline}
        large = by_size.get(LARGE_BYTES) or by_size[max(by_size)]
        small = by_size.get(SMALL_BYTES) or by_size[min(by_size)]
        line = (
            f"{large.backend} vs {baseline}: busbw at {format_size(large.bytes)} {large.busbw},"
            f" p50 time at {format_size(small.bytes)} {ratio_of(small.time)}"
        )
        lines.append(line if large.cpu is None else f"{line}, CPU s/GB {ratio_of(large.cpu)}")
    return lines


def measurements(run: PacedRun, ranks: int, limit: RawLimit | None) -> list[Measurement]:
    """One row a backend and size, by size, in the order of the backends."""
    places = sorted(run.turns.samples, key=lambda place: place[0].bytes)
    return [_row(case, name, run, ranks, limit) for case, name in places if run.turns.of(case, name)]


def _row(case: Case, name: str, run: PacedRun, ranks: int, limit: RawLimit | None) -> Measurement:
    samples = run.turns.of(case, name)
    is_raw = name.startswith(f"{RAW} x")
    collective = "one_way" if is_raw else case.collective
    links = 1 if is_raw or limit is None else limit.links
    busbw = case.bytes / statistics.median(sample.seconds for sample in samples) / 1e9 * busbw_factor(collective, ranks)
    return Measurement(
        name,
        collective,
        case.bytes,
        ranks,
        samples,
        share_of_raw=busbw * links / limit.gb_s if limit is not None else None,
        verified=run.verified.get((case, name)),
        note="one way" if is_raw else "WRONG DATA" if (case, name) in run.wrong else "",
    )


def best_raw_only(rows: Sequence[Measurement]) -> list[Measurement]:
    """For people: of raw TCP only the best number of streams of each size. The exports have them all."""
    best: dict[int, Measurement] = {}
    for row in rows:
        if row.collective == "one_way" and (row.bytes not in best or row.busbw_gb_s > best[row.bytes].busbw_gb_s):
            best[row.bytes] = row
    return [row for row in rows if row.collective != "one_way" or best[row.bytes] is row]


@dataclass(frozen=True)
class Report:
    """A finished run."""

    title: str
    ranks: int
    machine: MachineFacts
    backends: Mapping[str, str]  # what each one is: library, table, device
    notes: Sequence[str]  # what is missing, and why
    parameters: Mapping[str, object]
    wrong: Sequence[str]
    verified: bool  # data was checked at all
    repeats: int
    rows: Sequence[Measurement] = ()
    limit: RawLimit | None = None
    paired: Sequence[PairedSeries] = ()

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
            notes=[*self.notes, *self.wrong],
        )
