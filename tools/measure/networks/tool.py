"""`measure networks`: what Bagua-Net and Bagua's algorithms gain on a network of a given speed.

In each network, the ranks of all backends start once and take turns: NCCL's default, NCCL tuned by hand, and Bagua-Net,
enabled as users do it, with ENABLE_BAGUA_NET=1 alone. They all-reduce, and train with torch's DDP or FSDP2; the ranks
of Bagua-Net also train with Bagua's algorithms. Errors: losses of the baseline that differ between backends, ranks that
end with different parameters, a turn that fails, and a log of NCCL that names another network than that of the backend.
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
from pathlib import Path
from typing import Any

from netlab import NetlabError

from bagua.net.bench.api import (
    BEST_TUNED_NAME,
    DEFAULT_TUNED,
    MISSING,
    Backend,
    BenchError,
    Column,
    Figure,
    PairedRatio,
    Progress,
    Turns,
    format_time_us,
    make_backends,
    names_of,
    parse_size,
    read_proof_file,
    render_rows,
    shows_colour,
    tuned_settings,
)
from measure.core.catalogue import ALGORITHMS, FSDP, GROUPS, REFERENCE
from measure.core.ranks import bagua_net_by_activation, network_fault, start_on_network
from measure.core.run import size_of
from measure.core.step_statistics import turn_result
from measure.core.tool import add_steps, add_training
from measure.networks.comparison import Row, Sample, figures_of, model_case, row_of, size_case, training_faults
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
from measure.ranks.network import Network, add_networks, told_text
from measure.ranks.placement import Placement
from measure.ranks.team import RankTeam
from measure.report import Report, ranks_text
from measure.results import case_of

# Two ranks add two numbers in either order to the same sum; more ranks add in the order of NCCL's rings, which differs
# with the number of channels, and bf16 training carries the last bit's difference on. So do kernels that add in any
# order, which --deterministic excludes.
EXACT_RANKS = 2
DEFAULT_TOLERANCE = 0.05
# Of one turn of all-reduce.
_ALL_REDUCE_SECONDS = 0.3


def _time(seconds: float | None) -> str:
    return MISSING if seconds is None else format_time_us(seconds * 1e6)


def _times(ratio: PairedRatio | None) -> str:
    return MISSING if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


def _algorithm(row: Row) -> str:
    name = row.best_algorithm
    return MISSING if name is None else f"{name} {_times(row.algorithms[name][1])}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("network", "", lambda row: row.network, left=True),
    Column("told", "Mb/s", lambda row: told_text(row.network), optional=True),
    Column("", "", lambda row: row.case, left=True),
    Column("NCCL default", "us", lambda row: _time(row.default)),
    Column(BEST_TUNED_NAME, "us", lambda row: _time(row.best), optional=True),
    Column("bagua-net", "us", lambda row: _time(row.ours)),
    Column("over default", "x", lambda row: _times(row.over_default)),
    Column(f"over {BEST_TUNED_NAME}", "x", lambda row: _times(row.over_best), optional=True),
    Column("best algorithm", "x over bagua-net", _algorithm, left=True, optional=True),
)


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def convert(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(parse(part) for part in text.split(",") if part != "none"))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    parser = parser_of("networks", "What the plugin and the algorithms gain in each of several networks.")
    add_networks(parser)
    add_ranks(parser)
    parser.add_argument(
        "--sizes", type=several(parse_size), default=(), metavar="LIST", help="of all-reduce (default none)"
    )
    add_training(parser, ("mlp",), "mlp")
    parser.add_argument(
        "--algorithms",
        type=names_of("algorithm", list(ALGORITHMS), GROUPS),
        default=(),
        metavar="LIST",
        help="of Bagua, to train with over Bagua-Net (default none)",
    )
    parser.add_argument(
        "--baseline",
        choices=(REFERENCE, FSDP),
        default=REFERENCE,
        help=f"what all backends train with, and speed-ups of algorithms are over (default {REFERENCE})",
    )
    length = add_length(parser, rounds=3, time_limit_s=420.0, timeout_s=180.0)
    add_steps(length, steps=10, warmup=3)
    add_warm_up(length)
    parser.add_argument(
        "--tuned",
        default=DEFAULT_TUNED,
        help="hand-tuned NCCL as THREADSxSOCKETS[xCHANNELS], or several with commas; best: the settings of"
        f" bagua-net-bench --nccl --tuned best; none (default {DEFAULT_TUNED})",
    )
    parser.add_argument(
        "--tolerance", type=float, help="allowed relative difference of a loss (default: 0 where sums have one order)"
    )
    output = add_results(parser)
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
    given = parser.parse_args(words)
    choose_device(parser, given, gpus)
    check_results(parser, given, "--output-dir")
    given.algorithms = tuple(name for name in given.algorithms if name != given.baseline)
    if given.tolerance is None:
        is_exact = given.ranks <= EXACT_RANKS and (given.deterministic or given.device == "cpu")
        given.tolerance = 0.0 if is_exact else DEFAULT_TOLERANCE
    return given


def backends_of(given: argparse.Namespace) -> list[Backend]:
    """NCCL's default first, Bagua-Net last. Raises ValueError: --tuned names no setting."""
    own = make_backends(library=None, tuned=tuned_settings([given.tuned]), variants=[], with_shared_memory=False)
    return [*own, bagua_net_by_activation()]


class NetworkRun:
    """The turns in one network. Use as `with run.ranks(...): run.take(...)`."""

    def __init__(self, given: argparse.Namespace, network: Network, backends: Sequence[Backend], folder: Path) -> None:
        self._given, self._network, self._folder = given, network, folder
        self._backends = {backend.name: backend for backend in backends}
        self._ours = backends[-1].name
        self._teams: dict[str, tuple[RankTeam, list[Path]]] = {}
        self.turns: Turns[Sample] = Turns()
        self.cases = [*map(size_case, given.sizes), *(model_case(model, given.baseline) for model in given.model)]

    @contextlib.contextmanager
    def ranks(self, placement: Placement) -> Iterator[None]:
        """The ranks of all backends. Raises BenchError when they cannot be started."""
        failed = True
        all_given, baseline = vars(self._given), self._given.baseline
        options = argparse.Namespace(**{**all_given, "algorithms": (baseline,)})
        ours = argparse.Namespace(**{**all_given, "algorithms": (baseline, *self._given.algorithms)})
        try:
            for name, backend in self._backends.items():
                logs = self._folder / self._network.name / "".join(one if one.isalnum() else "-" for one in name)
                logs.mkdir(parents=True, exist_ok=True)
                given = ours if name == self._ours else options
                self._teams[name] = start_on_network(
                    given, backend, logs, tcp_only=True, placement=placement, form=False
                )
            for team, _ in self._teams.values():
                team.form()
            if self._given.device == "cuda":  # gloo has no connections to find
                for team, _ in self._teams.values():
                    self._warm_up(team)
            yield
            failed = False
        finally:
            for team, _ in self._teams.values():
                team.close(failed=failed)

    @property
    def facts(self) -> Mapping[str, Any]:
        return self._teams[self._ours][0].facts

    def take(self, time_limit_s: float, progress: Progress) -> None:
        given = self._given
        plan = {
            case.name: [*self._backends, *(given.algorithms if case.size_bytes is None else ())] for case in self.cases
        }
        self.turns.take(plan, given.rounds, self._turn, time_limit_s=time_limit_s, progress=progress)
        if given.device == "cuda":
            for name, (_, logs) in self._teams.items():
                if error := network_fault(f"{name}, {self._network.name}", self._backends[name], logs):
                    self.turns.errors.append(error)
        for case in self.cases:
            if case.size_bytes is None:
                self.turns.errors += training_faults(
                    self.turns, case.name, next(iter(self._backends)), given.algorithms, given.tolerance
                )

    def networks_seen(self) -> dict[str, str]:
        """Of each backend, as NCCL's logs have them."""
        return {
            name: "; ".join(dict.fromkeys(read_proof_file(log).summary() for log in logs))
            for name, (_, logs) in self._teams.items()
        }

    def rows(self) -> list[Row]:
        *own, ours = self._backends
        algorithms = self._given.algorithms
        rows = [row_of(self.turns, self._network.name, case.name, own, ours, algorithms) for case in self.cases]
        return [row for row in rows if row is not None]

    def figures(self) -> list[Figure]:
        given = self._given
        where = case_of(given.ranks, given.device, given.sharing)
        cases = {case.name: case for case in self.cases}
        return [
            figure
            for row in self.rows()
            for figure in figures_of(row, cases[row.case], self.turns, self._network, where)
        ]

    def _warm_up(self, team: RankTeam) -> None:
        end = time.monotonic() + self._given.warm_up
        while (left := end - time.monotonic()) > 0:
            seconds = min(left, _ALL_REDUCE_SECONDS)
            team.ask("all_reduce", self._given.timeout, size_bytes=WARM_UP_BYTES, seconds=seconds)

    def _turn(self, name: str, variant: str, number: int) -> Sample:
        case = next(case for case in self.cases if case.name == name)
        team, _ = self._teams[variant if variant in self._backends else self._ours]
        network = self._network.name
        if case.size_bytes is not None:
            events = team.ask(
                "all_reduce", self._given.timeout, size_bytes=case.size_bytes, seconds=_ALL_REDUCE_SECONDS
            )
            return Sample(network, name, variant, number, max(event["seconds"] for event in events))
        given = self._given
        algorithm = given.baseline if variant in self._backends else variant
        fields = {"algorithm": algorithm, "warmup": given.warmup, **size_of(given, case.model)}
        trained = turn_result(name, variant, number, team.ask("turn", given.timeout, **fields, steps=given.steps))
        return Sample(network, name, variant, number, statistics.median(trained.step_seconds), trained)


def main(words: Sequence[str] | None = None) -> int:
    given = parse_options(words)
    deadline = time.monotonic() + given.time_limit
    try:
        backends = backends_of(given)
    except ValueError as error:
        print(f"measure networks: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    figures: list[Figure] = []
    samples: list[Sample] = []
    lines: list[str] = []
    notes: list[str] = []
    errors: list[str] = []
    facts: Mapping[str, Any] = {}
    models = len(given.model)
    turns_each = (len(given.sizes) + models) * len(backends) + models * len(given.algorithms)
    # Of a scheduler or `timeout`: the report is written, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_interrupted = False
    with (
        tempfile.TemporaryDirectory(prefix="measure-networks-") as temporary,
        Progress(given.rounds * turns_each * len(given.networks)) as progress,
    ):
        for left, network in zip(range(len(given.networks), 0, -1), given.networks, strict=True):
            run = NetworkRun(given, network, backends, given.output_dir or Path(temporary))
            now = time.monotonic()
            end = now + max(deadline - now, 0.0) / left  # starting the ranks included
            try:
                with network.placement(given.ranks, given.device, given.sharing) as placement, run.ranks(placement):
                    facts = run.facts
                    run.take(max(end - time.monotonic(), 0.0), progress)
                    if given.device == "cuda":
                        lines += [f"{network.name}, {name}: {seen}" for name, seen in run.networks_seen().items()]
            except (BenchError, NetlabError) as error:
                errors.append(f"{network.name}: {error}")
            except KeyboardInterrupt:
                is_interrupted = True
                errors.append(f"interrupted in {network.name}: the table has what was measured until then")
            rows += run.rows()
            figures += run.figures()
            samples += run.turns.all()
            notes += [f"{network.name}: {note}" for note in run.turns.notes]
            errors += [f"{network.name}: {error}" for error in run.turns.errors]
            if is_interrupted:
                break
    lines = [
        f"{row.network}, {row.case}: {BEST_TUNED_NAME} is {row.best_name}" for row in rows if row.best_name
    ] + lines
    names = ", ".join(network.name for network in given.networks)
    return Report(
        title=f"All-reduce and training steps on {given.ranks} ranks, by network: {names}",
        heading=ranks_text(given, facts),
        table=render_rows(
            rows,
            COLUMNS,
            begins_block=lambda before, row: before.network != row.network,
            colour=shows_colour(sys.stdout),
        ),
        figures=figures,
        lines=lines,
        notes=notes,
        errors=errors,
        facts=facts,
        rows=rows,
        samples=samples,
    ).publish(given)
