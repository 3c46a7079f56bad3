"""--fresh-processes: two builds of the plugin, in many short rounds of new drivers.

Where buffers, ports and threads come to lie shifts a ratio by some percent for as long as the processes live. So the
rounds are the sample, and not the repetitions within one. The builds change places from round to round, so that
whatever depends on the place (who ran before, who was started first) falls on both alike.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bagua.net.bench.driver import BASELINE, PLUGIN
from bagua.net.bench.machine import check_memory
from bagua.net.bench.measurement import Case
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.ranks import Ranks
from bagua.net.bench.result_file import Figure, Label, ResultFile, result_of
from bagua.net.bench.ring.options import MIN_FRESH_PROCESSES, Options
from bagua.net.bench.ring.report import Report, paired_series
from bagua.net.bench.ring.run import describe_backend, described, pace_of
from bagua.net.bench.ring.sessions import RingSession
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import MISSING, Column, format_time_us, render_rows
from bagua.net.bench.turns import Turns
from bagua.net.bench.verdict import BUILDS_ERROR_CHANCE, PairedRatio, Verdict, ratio_of
from bagua.progress import Progress

# Changes up to this are not called, however steady: the same code at another place in memory can differ by as much.
FLOOR = 0.01
_TIME_WORDS = {Verdict.LESS: "faster", Verdict.SAME: "same", Verdict.MORE: "slower"}
_CPU_WORDS = {Verdict.LESS: "less CPU", Verdict.SAME: "", Verdict.MORE: "more CPU"}
# An idle machine resolves a few percent.
_NOISY = 0.1
_MIN_ROUND_S = 0.5


@dataclass
class Row:
    """One size; an entry a round. Ratios are of the plugin over the baseline: below 1 the plugin is better."""

    bytes: int
    times: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)  # fewer where the kernel counted none
    over_bare: list[float] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by backend

    @property
    def time(self) -> PairedRatio:
        return ratio_of(self.times, BUILDS_ERROR_CHANCE)

    @property
    def cpu(self) -> PairedRatio | None:
        return ratio_of(self.cpus, BUILDS_ERROR_CHANCE) if len(self.cpus) == len(self.times) else None

    def us(self, backend: str) -> float:
        return statistics.median(self.seconds[backend]) * 1e6

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

    def figures(self, channels: int) -> list[Figure]:
        case: dict[str, Label] = {"channels": channels, "size_bytes": self.bytes, "baseline": BASELINE}
        found = [_figure({**case, "verdict": self.verdict}, "time_ratio", self.time)]
        if self.cpu is not None:
            found.append(_figure(case, "cpu_ratio", self.cpu))
        for metric, backend in (("time", PLUGIN), ("baseline_time", BASELINE)):
            found.append(Figure(case, metric, "us", self.us(backend), repetitions=len(self.times)))
        if self.over_bare:
            found.append(_figure({**case, "baseline": "bare"}, "time_ratio", ratio_of(self.over_bare)))
        return found


def _figure(case: Mapping[str, Label], metric: str, ratio: PairedRatio) -> Figure:
    return Figure(case, metric, "x", ratio.median, ratio.low, ratio.high, ratio.repetitions)


def _spread(ratio: PairedRatio | None) -> str:
    return MISSING if ratio is None else f"{ratio.low:.3f}..{ratio.high:.3f}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("size", "", lambda row: format_size(row.bytes)),
    Column(BASELINE, "us", lambda row: format_time_us(row.us(BASELINE))),
    Column(PLUGIN, "us", lambda row: format_time_us(row.us(PLUGIN))),
    Column("time", "ratio", lambda row: f"{row.time.median:.3f}"),
    Column("spread", "", lambda row: _spread(row.time)),
    Column("CPU", "ratio", lambda row: MISSING if row.cpu is None else f"{row.cpu.median:.3f}"),
    Column("spread", "", lambda row: _spread(row.cpu)),
    Column(
        "vs bare", "", lambda row: f"{statistics.median(row.over_bare):.2f}" if row.over_bare else "", optional=True
    ),
    Column("verdict", "", lambda row: row.verdict, left=True),
)


@dataclass(frozen=True)
class BuildReport(Report):
    compared: Sequence[Row] = ()

    @property
    def is_worse(self) -> bool:
        return any(row.is_worse for row in self.compared)

    def table(self, *, colour: bool = False) -> str:
        return render_rows(self.compared, COLUMNS, is_loud=lambda row: row.is_worse, colour=colour)

    def verdicts(self) -> list[str]:
        if not self.compared:
            return [f"verdict: none, no size was measured in {MIN_FRESH_PROCESSES} rounds; give more --time-budget"]
        seen = [row.resolution for row in self.compared]
        best, typical, worst = min(seen), statistics.median(seen), max(seen)
        rounds = f"the median of {self.repeats} rounds of fresh processes"
        noisy = "note: that is much, so the machine is busy or noisy; repeat this where nothing else runs"
        sizes = {
            word: [format_size(row.bytes) for row in self.compared if word in row.verdict.split(", ")]
            for word in ("faster", "less CPU", "slower", "more CPU")
        }
        return [
            f"ratio: {PLUGIN} over {BASELINE}, below 1 the plugin is better; {rounds}",
            f"spread: holds the true median but for a chance of {BUILDS_ERROR_CHANCE:.1%}",
            f"same: the spread straddles 1, or the ratio is within {FLOOR:.0%} of 1",
            f"resolution: in the typical row changes of time above {typical:.1%} are seen ({best:.1%}..{worst:.1%})",
            *([noisy] if typical > _NOISY else []),
            *(f"{word}: {len(of)} of {len(seen)} rows: {', '.join(of)}" for word, of in sizes.items() if of),
            *([] if any(sizes.values()) else [f"verdict: all {len(seen)} rows are the same"]),
        ]

    def result(self) -> ResultFile:
        found = [one for row in self.compared for one in row.figures(int(str(self.parameters["channels"])))]
        parameters = {**self.parameters, "backends": dict(self.backends)}
        return result_of(self.title, found, machine=self.machine, parameters=parameters, notes=self.notes)


def compare_builds(
    ranks: Ranks, options: Options, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
) -> BuildReport:
    """Fewer rounds, but never less than MIN_FRESH_PROCESSES, where the machine is too slow for all of them."""
    deadline = clock() + options.time_budget_s
    ranks_here = sum(place is ranks.places[0] for place in ranks.places)
    check_memory(max(options.sizes), ranks_here, len(options.backends))
    # Even, so that each order is as frequent.
    pairs = -(-(options.fresh_processes or MIN_FRESH_PROCESSES) // 2)
    orders = {"plugin first": options.backends, "baseline first": _swapped(options.backends)}
    rows = {size: Row(size) for size in options.sizes}
    backends: dict[str, str] = {}
    verified: list[bool] = []
    wrong: list[str] = []

    def measure(_case: str, order: str, _pair: int) -> None:
        sessions = [RingSession(name, ranks.places) for name in orders[order]]
        for session in sessions:
            session.connect(options.timeout_s)
            backends[session.name] = describe_backend(session.name, session.listening[0], options, environment)
        # The bytes are the same in every round.
        verify = options.verify and not verified
        left_s = max(_MIN_ROUND_S, (deadline - clock()) / max(1, 2 * pairs - len(verified)))
        left_s *= 3 if verify else 1
        run = PacedRun(
            {Case("all_reduce", size): sessions for size in options.sizes},
            pace_of(options, left_s, verify),
            lambda total: Progress(total, quiet=True),
        )
        run.run()
        verified.append(verify)
        wrong.extend(run.faults())
        _add(rows, run)
        for session in sessions:
            session.close()

    turns: Turns[None] = Turns()
    with Progress(2 * pairs) as display:
        display.message(f"{2 * pairs} rounds of {ranks.count} ranks each, about {options.time_budget_s:.0f} s")
        turns.take(
            {"": list(orders)},
            pairs,
            measure,
            time_limit_s=options.time_budget_s,
            rounds_first=True,
            least_rounds=-(-MIN_FRESH_PROCESSES // 2),
            failures=(),
            progress=display,
            limit=f"--time-budget {options.time_budget_s:g}",
            clock=clock,
        )
    short = [format_size(row.bytes) for row in rows.values() if len(row.times) < MIN_FRESH_PROCESSES]
    return BuildReport(
        **described(ranks, options, environment, len(verified)),
        backends={name: backends[name] for name in options.backends},
        notes=[
            *turns.notes,
            *([f"left out, for lack of time: {', '.join(short)}; raise --time-budget"] if short else []),
        ],
        wrong=wrong,
        verified=options.verify,
        compared=[row for row in rows.values() if len(row.times) >= MIN_FRESH_PROCESSES],
    )


def _swapped(backends: Sequence[str]) -> list[str]:
    other = {PLUGIN: BASELINE, BASELINE: PLUGIN}
    return [other.get(name, name) for name in backends]


def _add(rows: Mapping[int, Row], run: PacedRun) -> None:
    for series in paired_series(run.turns, [BASELINE, "bare"]):
        row = rows[series.bytes]
        if series.baseline == "bare":
            row.over_bare.append(statistics.median(series.time))
            continue
        row.times.append(statistics.median(series.time))
        if series.cpu is not None:
            row.cpus.append(statistics.median(series.cpu))
    for (case, name), samples in run.turns.samples.items():
        found = [one.typical_seconds if case.wants_latency else one.seconds for one in samples.values()]
        rows[case.bytes].seconds[name].append(statistics.median(found))
