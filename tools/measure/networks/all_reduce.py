"""`measure all-reduce`: all-reduce of NCCL's own settings and of Bagua-Net as users enable it, in a table of networks
and sizes.

In each network, all backends start once and take turns. A run that is cut off, or that ends at its time limit, is taken
up by the next one with the same --lines, network by network. Errors: a backend that does not start, fails, computes a
wrong sum or used another network than its own; the others go on without it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from netlab import TOLD, LinkPlan, NetlabError

from bagua.net.bench.api import (
    BEST_TUNED_NAME,
    MISSING,
    RANK_PROGRAM,
    Backend,
    BenchError,
    Column,
    Figure,
    Label,
    Progress,
    Turns,
    backend_label,
    bagua_net_variant,
    describe_machine,
    figures,
    format_size,
    format_time_us,
    make_backends,
    parse_size,
    read_proof_file,
    render_rows,
    shows_colour,
    tuned_settings,
    within,
)
from measure.core.ranks import bagua_net_by_activation, network_fault, start_on_network
from measure.networks.cells import LEAST_RATIO, RAW, Cell, CellLog, Row, Sample, Times, parse_cell, rows_of
from measure.networks.tool import several
from measure.nics.nic_set import Nic, NicSet
from measure.nics.raw_tcp import RawTcp
from measure.options import (
    WARM_UP_BYTES,
    add_length,
    add_ranks,
    add_results,
    add_warm_up,
    check_results,
    choose_device,
    parser_of,
)
from measure.ranks.lab_placement import LabPlacement
from measure.ranks.network import Network, add_networks, parse_network, told_text
from measure.ranks.placement import Placement
from measure.ranks.team import RankTeam
from measure.report import Report, ranks_text, sharing_notes
from measure.results import case_of

SIZES = "64K,256K,1M,4M,16M,64M,256M"
TUNED = "2x4,2x2x8,2x2x16"
BELOW = "below"
# Of processes that load torch and open connections at the same time. One that hangs must not take the others' time.
_START_S = 60.0
_FRESH_TURNS = 3
_MAX_ITERATIONS = 1000
_SINGLE = 5
_VERIFIED_BYTES = 1 << 20
# Raw TCP in each direction: what the connections of all backends share, and as many as a limit per connection needs.
_RAW_STREAMS = 8
_RAW_FROM_BYTES = 16 << 20


def _times(times: Times) -> str:
    low, middle, high = (format_time_us(value * 1e6) for value in (times.low, times.median, times.high))
    return f"{middle} ({low}..{high})"


COLUMNS: tuple[Column[Row], ...] = (
    Column("network", "", lambda row: row.cell.network, left=True),
    Column("", "", lambda row: "fresh starts" if row.cell.is_fresh else "", left=True, optional=True),
    Column("told", "Mb/s", lambda row: told_text(row.cell.network), optional=True),
    Column("size", "", lambda row: format_size(row.cell.size_bytes)),
    Column("backend", "", lambda row: row.backend, left=True),
    Column("rounds", "", lambda row: str(row.rounds)),
    Column("time", "us", lambda row: _times(row.ours)),
    Column("best of NCCL", "us", lambda row: _times(row.best)),
    Column("", "", lambda row: row.best_name.removeprefix("NCCL "), left=True),
    Column("over best", "x", lambda row: f"{row.ratio:.2f}"),
    Column("", "", lambda row: row.verdict, left=True),
    Column("of raw TCP", "x", lambda row: MISSING if row.of_raw is None else f"{row.of_raw:.2f}", optional=True),
)


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    parser = parser_of("all-reduce", "All-reduce over the plugin and over NCCL's own sockets, by network and size.")
    add_networks(parser)
    add_ranks(parser, least=2)
    parser.add_argument("--sizes", type=several(parse_size), default=SIZES, metavar="LIST", help=f"default {SIZES}")
    parser.add_argument(
        "--tuned",
        default=TUNED,
        metavar="LIST",
        help=f"hand-tuned NCCL, as of bagua-net-bench --nccl --tuned (default {TUNED})",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:VAR=VALUE,...",
        help="the plugin with variables set, besides the plugin without; may be repeated",
    )
    parser.add_argument("--raw", action="store_true", help="also raw TCP in both directions, in emulated networks")
    length = add_length(parser, rounds=7, time_limit_s=560.0, timeout_s=60.0)
    length.add_argument(
        "--network-limit",
        type=within(float, 1.0, 86400.0),
        default=50.0,
        metavar="S",
        help="seconds for one network, from when all backends have started (default 50)",
    )
    length.add_argument(
        "--turn", type=within(float, 0.001, 60.0), default=0.15, metavar="S", help="seconds of a turn (default 0.15)"
    )
    add_warm_up(length)
    length.add_argument(
        "--fresh",
        type=within(int, 0, 1000),
        default=0,
        metavar="N",
        help="measure --cells instead, with N starts of the plugin and of the best of NCCL's settings in --lines",
    )
    length.add_argument(
        "--cells",
        type=lambda text: text if text == BELOW else several(parse_cell)(text),
        default=BELOW,
        metavar="LIST",
        help=f"of --fresh, as NETWORK/SIZE: 25G:9000/1M; {BELOW}: those of --lines below {LEAST_RATIO} (default)",
    )
    output = add_results(parser)
    output.add_argument(
        "--lines", type=Path, metavar="PATH", help="append every sample, as JSON lines, and measure what it lacks"
    )
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
    parser.set_defaults(deterministic=False, dtype="float32")  # of start_on_network
    given = parser.parse_args(words)
    choose_device(parser, given, gpus)
    check_results(parser, given, "--output-dir")
    return given


def backends_of(given: argparse.Namespace) -> tuple[list[Backend], list[Backend]]:
    """NCCL's own, and ours. Raises ValueError."""
    own = make_backends(library=None, tuned=tuned_settings([given.tuned]), variants=[], with_shared_memory=False)
    ours = bagua_net_by_activation()
    return own, [ours, *(bagua_net_variant(text, ours) for text in given.variant)]


class Contest:
    """The backends in one network, alive together until `close`."""

    def __init__(
        self, given: argparse.Namespace, network: Network, backends: Sequence[Backend], placement: Placement, logs: Path
    ) -> None:
        """Starts them; those that cannot be started are in `errors`."""
        self._given, self._network = given, network
        self._backends = {backend.name: backend for backend in backends}
        self._teams: dict[str, tuple[RankTeam, list[Path]]] = {}
        self._seconds: dict[tuple[str, int], float] = {}
        self.errors: list[str] = []
        self.facts: Mapping[str, Any] = {}
        pool = ThreadPoolExecutor(len(backends))
        try:
            for name, backend in self._backends.items():
                folder = logs / "".join(one if one.isalnum() else "-" for one in f"{network.name}-{name}")
                folder.mkdir(parents=True, exist_ok=True)
                with self._giving_up(name):
                    self._teams[name] = start_on_network(
                        given,
                        backend,
                        folder,
                        tcp_only=True,
                        placement=placement,
                        form=False,
                        module=RANK_PROGRAM,
                        join=("dtype",),
                    )
            list(pool.map(self._form, list(self._teams)))
        except BaseException:
            self.close(failed=True)  # ends what the threads wait for
            raise
        finally:
            pool.shutdown()

    def close(self, *, failed: bool) -> None:
        while self._teams:
            self._teams.popitem()[1][0].close(failed=failed)

    @property
    def alive(self) -> list[str]:
        return [name for name in self._backends if name in self._teams]

    def networks_seen(self) -> list[str]:
        """As NCCL's logs have them."""
        return [
            f"{self._network.name}, {name}: " + "; ".join(dict.fromkeys(read_proof_file(log).summary() for log in logs))
            for name, (_, logs) in self._teams.items()
        ]

    def _form(self, name: str) -> None:
        team, logs = self._teams[name]
        with self._giving_up(name):
            team.form(_START_S)
            self.facts = team.facts
            # Opens the connections.
            answers = team.ask("verify", _START_S, collective="all_reduce", bytes=_VERIFIED_BYTES, salt=1)
            if wrong := sum(answer["wrong_elements"] for answer in answers):
                raise BenchError(f"{wrong} elements of an all-reduce of {format_size(_VERIFIED_BYTES)} are wrong")
            if self._given.device == "cuda" and (fault := network_fault(name, self._backends[name], logs)):
                raise BenchError(fault)

    @contextlib.contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        try:
            yield
        except BenchError as error:
            self.errors.append(f"{name} did not start: {error}")
            if name in self._teams:
                self._teams.pop(name)[0].close(failed=True)

    def measure(self, name: str, size_bytes: int, seconds: float) -> tuple[float, float | None]:
        """Seconds of one of several all-reduces that take about `seconds` together, and of one alone, None if there was
        no time for several. The first time at a size, as many go before, and before the first size, those of --warm-up.
        Raises BenchError, after which the backend has ended."""
        if name not in self._teams:
            raise BenchError("it has ended")
        if not any(measured == name for measured, _ in self._seconds):
            end, each = time.monotonic() + self._given.warm_up, seconds
            while time.monotonic() < end:
                each, _ = self._ask(name, WARM_UP_BYTES, self._count(seconds, each))
        known = self._seconds.get((name, size_bytes))
        if known is None:
            # Not counted: a job's connections know their path from the steps before.
            known, _ = self._ask(name, size_bytes, 1)
            known, _ = self._ask(name, size_bytes, self._count(seconds, known))
        found = self._ask(name, size_bytes, self._count(seconds, known))
        self._seconds[name, size_bytes] = found[0]
        return found

    @staticmethod
    def _count(seconds: float, each: float) -> int:
        return max(1, min(_MAX_ITERATIONS, round(seconds / each)))

    def _ask(self, name: str, size_bytes: int, count: int) -> tuple[float, float | None]:
        team, _ = self._teams[name]
        fields = {"collective": "all_reduce", "bytes": size_bytes, "iterations": count, "warmup": min(count, 2)}
        try:
            answers = team.ask("time", self._given.timeout, **fields, single=min(count - 1, _SINGLE))
        except BenchError:
            self._teams.pop(name)[0].close(failed=True)
            raise
        seconds = max(answer["seconds"] for answer in answers) / count
        singles = [max(ranks) for ranks in zip(*(answer["single_seconds"] for answer in answers), strict=True)]
        return seconds, statistics.median(singles) if singles else None


class Measurement:
    """The cells of one network, one after the other; of fresh starts, one start after the other."""

    def __init__(self, given: argparse.Namespace, network: Network, backends: Sequence[Backend], log: CellLog) -> None:
        self._given, self._network, self._log = given, network, log
        self._backends = backends
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.lines: list[str] = []

    def run(self, plan: Mapping[Cell, Sequence[str]], deadline: float, logs: Path, progress: Progress) -> None:
        """Raises BenchError or NetlabError where nothing can be measured."""
        given = self._given
        names = {name for found in plan.values() for name in found}
        backends = [backend for backend in self._backends if backend.name in names]
        turns: Turns[Sample] = Turns()
        with (
            self._network.placement(given.ranks, given.device, given.sharing) as placement,
            contextlib.ExitStack() as stack,
        ):
            raw = self._raw(placement, stack) if RAW in names else None

            def start() -> Contest:
                contest = Contest(given, self._network, backends, placement, logs)
                self.errors += contest.errors
                return contest

            contests = {0: start()}
            stack.callback(lambda: [contest.close(failed=True) for contest in contests.values()])

            def turn(cell: Cell, name: str, number: int) -> Sample:
                if given.fresh and number not in contests:
                    contests.popitem()[1].close(failed=False)
                    contests[number] = start()
                (contest,) = contests.values()
                if name == RAW:
                    assert raw is not None
                    found = [(cell.size_bytes / raw.rate([0], given.turn), None)]
                else:
                    count = _FRESH_TURNS if given.fresh else 1
                    found = [contest.measure(name, cell.size_bytes, given.turn) for _ in range(count)]
                singles = [single for _, single in found if single is not None]
                sample = Sample(
                    cell,
                    name,
                    number,
                    statistics.median(seconds for seconds, _ in found),
                    statistics.median(singles) if singles else None,
                )
                self._log.add(sample)
                return sample

            usable = {*contests[0].alive, *([RAW] if raw is not None else [])}
            usable_plan = {cell: [name for name in found if name in usable] for cell, found in plan.items()}
            facts = {"facts": dict(contests[0].facts), "told_mbps": self._network.told_mbit}
            self._log.begin(list(plan), **facts, machine=describe_machine().as_dict())
            left_s = max(0.0, deadline - time.monotonic())
            is_last = bool(given.fresh) or left_s < given.network_limit
            # A cell that another run can measure with more time is not left with a part of its rounds.
            enough = given.fresh or given.rounds
            try:
                turns.take(
                    usable_plan,
                    given.fresh or given.rounds,
                    turn,
                    time_limit_s=left_s if is_last else given.network_limit,
                    rounds_first=bool(given.fresh),
                    fails_everywhere=not given.fresh,
                    limit=f"--time-limit {given.time_limit:g}"
                    if is_last
                    else f"--network-limit {given.network_limit:g}",
                    progress=progress,
                )
                enough = enough if is_last else 1
            finally:
                needed = {backend.name for backend in backends if backend.is_own_tcp or backend.is_ours}
                done = [
                    cell
                    for cell, found in plan.items()
                    if all(len(turns.of(cell, name)) >= enough for name in needed.intersection(found))
                ]
                self._log.end(done)
                self.notes += turns.notes
                self.errors += turns.errors
            if given.device == "cuda":
                self.lines += next(iter(contests.values())).networks_seen()

    def _raw(self, placement: Placement, stack: contextlib.ExitStack) -> RawTcp | None:
        assert isinstance(placement, LabPlacement)
        told = LinkPlan(self._network.rate_mbit).speed_mbit(TOLD)
        try:
            nics = NicSet(self._network.name, (Nic(told),))
            return stack.enter_context(RawTcp(nics, placement.lab, self._given.timeout, streams=_RAW_STREAMS))
        except BenchError as error:
            self.errors.append(f"{RAW} did not start: {error}")
            return None


def plan_of(
    given: argparse.Namespace, log: CellLog, names: Sequence[str], ours: str
) -> dict[Network, dict[Cell, list[str]]]:
    """What is to be measured: in each network the cells that `log` lacks, each with its backends."""
    found: dict[Network, dict[Cell, list[str]]] = {}
    if given.fresh:
        rows = {row.cell: row for cell in log.cells() if not cell.is_fresh for row in rows_of(log.turns, cell)}
        rows = {cell: row for cell, row in rows.items() if row.backend == ours}
        below = [cell for cell, row in rows.items() if row.ratio < LEAST_RATIO]
        for cell in below if given.cells == BELOW else given.cells:
            both = [rows[cell].best_name, ours] if cell in rows else list(names)
            found.setdefault(parse_network(cell.network), {})[replace(cell, is_fresh=True)] = both
    else:
        for network in given.networks:
            raw = [RAW] if given.raw and network.is_emulated else []
            cells = [Cell(network.name, size) for size in given.sizes]
            found[network] = {cell: [*names, *(raw if cell.size_bytes >= _RAW_FROM_BYTES else [])] for cell in cells}
    left = {network: {c: n for c, n in plan.items() if c not in log.finished} for network, plan in found.items()}
    return {network: plan for network, plan in left.items() if plan}


def figures_of(given: argparse.Namespace, log: CellLog, rows: Sequence[Row]) -> list[Figure]:
    found = []
    where = case_of(given.ranks, given.device, given.sharing)
    for cell in log.cells():
        fresh: dict[str, Label] = {"fresh_starts": True} if cell.is_fresh else {}
        labels = {"collective": "all_reduce", "size_bytes": cell.size_bytes, **fresh}
        labels |= {**parse_network(cell.network).labels(), **where}
        for of, name in log.turns.samples:
            if of == cell:
                times = [sample.seconds * 1e6 for sample in log.turns.of(cell, name)]
                found += figures({"backend": backend_label(name), **labels}, {("time", "us"): times})
        for row in rows:
            if row.cell == cell:
                case = {"backend": backend_label(row.backend), "baseline": backend_label(BEST_TUNED_NAME)}
                case |= {"setting": row.best_name, "verdict": row.verdict, **labels}
                found.append(Figure(case, "speedup", "x", row.ratio, repetitions=row.rounds))
    return found


def summary_of(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name in dict.fromkeys(row.backend for row in rows):
        mine = {row.cell: row for row in rows if row.backend == name}
        for fresh in [cell for cell in mine if cell.is_fresh]:
            mine.pop(replace(fresh, is_fresh=False), None)  # measured again, which is what counts
        below = [row for row in mine.values() if row.ratio < LEAST_RATIO]
        slower = [row for row in below if not (row.cell.is_fresh and row.verdict == "level")]
        cells = ", ".join(f"{row.cell} {row.ratio:.2f}" for row in slower)
        lines.append(f"{name}: {len(mine)} cells, {len(slower)} below {LEAST_RATIO}" + (f": {cells}" if cells else ""))
    return lines


def main(words: Sequence[str] | None = None) -> int:
    given = parse_options(words)
    deadline = time.monotonic() + given.time_limit
    try:
        own, ours = backends_of(given)
        log = CellLog(given.lines)
    except ValueError as error:
        print(f"measure all-reduce: {error}", file=sys.stderr)
        return 2
    backends = [*own, *ours]
    plans = plan_of(given, log, [backend.name for backend in backends], ours[0].name)
    lines: list[str] = []
    notes: list[str] = []
    errors: list[str] = []
    # Of a scheduler or `timeout`: the report is written, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    turns = sum(len(names) for plan in plans.values() for names in plan.values()) * (given.fresh or given.rounds)
    with tempfile.TemporaryDirectory(prefix="measure-all-reduce-") as temporary, Progress(turns) as progress:
        try:
            for network, plan in plans.items():
                if deadline - time.monotonic() < given.network_limit:
                    notes.append(f"{network.name} is left for the next run with the same --lines: --time-limit")
                    continue
                measurement = Measurement(given, network, backends, log)
                try:
                    measurement.run(plan, deadline, given.output_dir or Path(temporary), progress)
                except (BenchError, NetlabError) as error:
                    measurement.errors.append(str(error))
                lines += measurement.lines
                notes += [f"{network.name}: {note}" for note in measurement.notes]
                errors += [f"{network.name}: {error}" for error in measurement.errors]
        except KeyboardInterrupt:
            errors.append("interrupted: the table has what was measured until then")
    rows = [row for cell in log.cells() for row in rows_of(log.turns, cell)]
    return Report(
        title=f"All-reduce on {given.ranks} ranks, by network and size",
        heading=ranks_text(given, log.facts),
        table=render_rows(
            rows,
            COLUMNS,
            begins_block=lambda before, row: before.cell.network != row.cell.network,
            is_loud=lambda row: row.verdict == "slower",
            colour=shows_colour(sys.stdout),
        ),
        figures=figures_of(given, log, rows),
        lines=summary_of(rows) + lines,
        notes=notes + sharing_notes(given),
        errors=errors,
        facts=log.facts,
        parameters={"backends": {backend.name: backend.settings for backend in backends}},
        rows=rows,
        samples=log.turns.all(),
    ).publish(given)
