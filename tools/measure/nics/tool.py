"""`measure nics`: what several NICs of a host carry together, and what the loss of one costs.

In each emulated network of two hosts, the ranks of all setups start once and take turns: NCCL's own transport and the
plugin, each with the best NIC and with all, and the plugin with all NICs joined as one device. On CPUs the plugin's
load driver takes the place of NCCL. Raw TCP, and MPTCP where the kernel has it, say what can be had. With --cuts, NICs
are cut off and returned meanwhile. Errors: a sum that is wrong, a turn that fails, a log that shows another network or
no joined device, and training with cuts that does not give the same bits as without.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from netlab import NetlabError

from bagua.net.bench.api import (
    MISSING,
    BenchError,
    Column,
    Figure,
    Progress,
    figures,
    format_bandwidth,
    format_size,
    format_time_us,
    parse_size,
    render_rows,
    shows_colour,
    within,
)
from measure.core.run import size_of
from measure.core.tool import add_training
from measure.networks.tool import several
from measure.nics.comparison import (
    RAW_ALL,
    RAW_BEST,
    RAW_CASE,
    Row,
    Sample,
    figures_of,
    median,
    raw_figures,
    slower_lines,
)
from measure.nics.cuts import CutReport, all_reduce_with_cuts, train_with_cuts
from measure.nics.lab_ranks import DriverRanks, GpuRanks
from measure.nics.mptcp import missing_mptcp, mptcp_rate
from measure.nics.nic_set import HOSTS, parse_nic_sets
from measure.nics.run import NicRun
from measure.nics.setups import ALL, BEST, JOINED, OWN_ALL, OWN_BEST, Setup, setups_for
from measure.options import add_length, add_ranks, add_results, check_results, choose_device, parser_of
from measure.report import Report, ranks_text
from measure.results import case_of

_NETWORKS = "10G/2500M"
_SIZES = "8,1K,64K,1M,16M,256M"
_CUT_SIZE_BYTES = 4 << 20
_MPTCP_SECONDS = 1.0
# Of cut training beyond its steps without cuts.
_CUTS_TIMEOUT_FACTOR = 4
_STARTS_AT_ONCE = 64


def _time(setup: Setup) -> Column[Row]:
    def cell(row: Row) -> str:
        return format_time_us(row.seconds[setup.name] * 1e6) if setup.name in row.seconds else MISSING

    return Column(setup.name, "us", cell, optional=True)


def _over(setup: Setup) -> Column[Row]:
    def cell(row: Row) -> str:
        ratio = row.over.get(setup.name)
        return MISSING if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"

    return Column(f"over {setup.name}", "x", cell, optional=True)


COLUMNS: tuple[Column[Row], ...] = (
    Column("NICs", "", lambda row: row.network, left=True),
    Column("size", "", lambda row: format_size(row.size_bytes)),
    *map(_time, (OWN_BEST, OWN_ALL, BEST, ALL, JOINED)),
    *map(_over, (OWN_BEST, OWN_ALL, BEST, ALL)),
    Column(
        "joined",
        "GB/s",
        lambda row: MISSING if (rate := row.bytes_per_second) is None else format_bandwidth(rate / 1e9),
    ),
    Column("of raw TCP", "%", lambda row: MISSING if row.of_raw is None else f"{row.of_raw * 100:.0f}"),
)


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    parser = parser_of("nics", "What several NICs of a host carry together, in each of several emulated networks.")
    parser.add_argument(
        "--networks",
        type=parse_nic_sets,
        default=_NETWORKS,
        metavar="LIST",
        help="the NICs of each host as RATE[+DELAY][~LOSS], the best one first, with slashes between them:"
        f" 10G/2500M,10G/10G+5ms,10G/1G~1%% (default {_NETWORKS}); needs root",
    )
    add_ranks(parser, least=HOSTS, most=HOSTS)
    parser.add_argument(
        "--sizes", type=several(parse_size), default=_SIZES, metavar="LIST", help=f"of all-reduce (default {_SIZES})"
    )
    parser.add_argument(
        "--cuts",
        type=within(float, 0.0, 3600.0),
        default=0.0,
        metavar="S",
        help="then, in the first network, cut one NIC after the other during so many seconds of training (on CPUs: of"
        " all-reduces)",
    )
    parser.add_argument(
        "--down", type=within(float, 0.1, 600.0), default=2.0, metavar="S", help="how long a cut lasts (default 2)"
    )
    add_training(parser, ("wide",), "wide; what --cuts trains")
    add_length(parser, rounds=3, time_limit_s=60.0, timeout_s=30.0)
    output = add_results(parser)
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
    given = parser.parse_args(words)
    choose_device(parser, given, gpus)
    check_results(parser, given, "--output-dir")
    return given


class _Findings:
    """What is reported, network by network."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.figures: list[Figure] = []
        self.samples: list[Sample] = []
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.facts: dict[str, object] = {}

    def add(self, run: NicRun, given: argparse.Namespace) -> None:
        name, turns = run.nic_set.name, run.turns
        rows = run.rows()
        where = case_of(given.ranks, given.device, given.sharing)
        self.rows += rows
        self.figures += raw_figures(name, turns)
        self.figures += [figure for row in rows for figure in figures_of(row, turns, where)]
        self.samples += turns.all()
        rates = {variant: median(turns, RAW_CASE, variant) for variant in (RAW_BEST, RAW_ALL)}
        carried = ", ".join(f"{variant} {8 / seconds:.2f}" for variant, seconds in rates.items() if seconds)
        self.lines.append(f"{name}, raw TCP in Gb/s each way: {carried or 'not measured'}")
        self.lines += slower_lines(rows)
        self.notes += [f"{name}: {note}" for note in turns.notes]
        self.errors += [f"{name}: {error}" for error in turns.errors]

    def add_mptcp(self, run: NicRun) -> None:
        name = run.nic_set.name
        try:
            rate = mptcp_rate(run.nic_set, run.lab, _MPTCP_SECONDS)
        except OSError as error:
            self.lines.append(f"{name}, MPTCP could not be measured: {error}")
            return
        self.lines.append(f"{name}, MPTCP in Gb/s each way, one connection over all NICs: {rate * 8e-9:.2f}")
        self.figures += figures({"backend": "mptcp", "nics": name}, {("busbw", "GB/s"): [rate / 1e9]})

    def add_cuts(self, report: CutReport, network: str) -> None:
        self.lines += [f"{network}, {line}" for line in report.lines()]
        self.errors += [f"{network}, cuts: {difference}" for difference in report.differences]
        if not report.cuts:
            self.errors.append(f"{network}: no NIC was cut in the time there was; allow more with --cuts")
        case = {"backend": JOINED.name, "nics": network}
        self.figures += figures({**case, "cuts": False}, {("step_time", "ms"): [1e3 * s for s in report.undisturbed_s]})
        self.figures += figures({**case, "cuts": True}, {("step_time", "ms"): [1e3 * s for s in report.disturbed_s]})
        self.figures += figures(case, {("lost_by_cut", "s"): report.lost_s})


def _with_cuts(given: argparse.Namespace, run: NicRun) -> CutReport:
    ranks, nics = run.ranks.get(JOINED.name), len(run.nic_set.nics)
    if isinstance(ranks, GpuRanks):
        size = size_of(given, given.model[0])
        timeout = _CUTS_TIMEOUT_FACTOR * given.cuts + given.timeout
        return train_with_cuts(
            ranks, run.lab, nics, size=size, seconds=given.cuts, down_s=given.down, timeout_s=timeout
        )
    if isinstance(ranks, DriverRanks):
        return all_reduce_with_cuts(
            ranks, run.lab, nics, size_bytes=_CUT_SIZE_BYTES, seconds=given.cuts, down_s=given.down
        )
    raise BenchError("the ranks with joined NICs were not started, so no NIC is cut")


def _measure(given: argparse.Namespace, setups: Sequence[Setup], found: _Findings, logs: Path) -> None:
    runs: list[NicRun] = []
    turns = given.rounds * (2 + len(given.sizes) * len(setups)) * len(given.networks)
    with ExitStack() as stack, Progress(turns) as progress:
        for network in given.networks:
            try:
                runs.append(stack.enter_context(NicRun(given, network, setups, logs)))
            except (BenchError, NetlabError) as error:
                found.errors.append(f"{network.name}: {error}")
        pool = ThreadPoolExecutor(_STARTS_AT_ONCE)
        # Not waited for, so that an interruption is reported at once.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        forming = [run.form(pool) for run in runs]
        for run, ranks in zip(runs, forming, strict=True):
            run.keep_formed(ranks)
            found.facts |= run.facts
        lacking = missing_mptcp()
        if lacking is not None:
            found.lines.append(lacking)
        for number, run in enumerate(runs):
            try:
                run.take(given.time_limit / len(runs), progress)
                if lacking is None:
                    found.add_mptcp(run)
            finally:
                found.add(run, given)
            if number == 0 and given.cuts:
                try:
                    found.add_cuts(_with_cuts(given, run), run.nic_set.name)
                except BenchError as error:
                    found.errors.append(f"{run.nic_set.name}, cuts: {error}")


def main(words: Sequence[str] | None = None) -> int:
    """What was measured until Ctrl-C or SIGTERM is reported."""
    given = parse_options(words)
    setups = setups_for(given.device)
    found = _Findings()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="measure-nics-") as temporary:
            _measure(given, setups, found, given.output_dir or Path(temporary))
    except KeyboardInterrupt:
        found.errors.append("interrupted")
    finally:
        signal.signal(signal.SIGTERM, before)
    names = ", ".join(network.name for network in given.networks)
    return Report(
        title=f"All-reduce over several NICs of two hosts: {names}",
        heading=ranks_text(given, found.facts),
        table=render_rows(
            found.rows,
            COLUMNS,
            begins_block=lambda row_before, row: row_before.network != row.network,
            colour=shows_colour(sys.stdout),
        ),
        figures=found.figures,
        lines=found.lines,
        notes=found.notes,
        errors=found.errors,
        facts=found.facts,
        rows=found.rows,
        samples=found.samples,
    ).publish(given)
