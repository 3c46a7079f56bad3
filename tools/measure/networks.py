"""`measure networks`: train with torch's DDP over NCCL's own network, hand-tuned, and over Bagua-Net, and compare
losses and step times.

Each turn starts new ranks, because NCCL reads its settings once per process. Bagua-Net is enabled as users do it, with
ENABLE_BAGUA_NET=1 alone. Errors: the losses of two networks differ, ranks end with different parameters, a turn fails,
or NCCL's log names another network than that of the backend.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.net.bench.argument_types import within
from bagua.net.bench.figures import figures
from bagua.net.bench.nccl_ab.backend import DEFAULT_TUNED, Backend, make_backends, tuned_settings
from bagua.net.bench.nccl_ab.log import read_proof_file
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import Figure
from bagua.net.bench.table import MISSING, Column, render_rows, shows_colour
from bagua.net.bench.turns import Turns
from bagua.net.bench.verdict import PairedRatio, paired_ratio
from measure.core.catalogue import REFERENCE
from measure.core.ranks import bagua_net_by_activation, network_fault, start_on_network
from measure.core.run import size_of
from measure.core.step_statistics import TurnResult, turn_result
from measure.core.tool import add_steps, add_training
from measure.options import add_length, add_ranks, add_results, check_results, choose_device, parser_of
from measure.report import Report, format_ms, number, ranks_text
from measure.results import case_of, name_of

# Two ranks add two numbers in either order to the same sum; more ranks add in the order of NCCL's rings, which differs
# with the number of channels, and bf16 training carries the last bit's difference on.
EXACT_RANKS = 2
DEFAULT_TOLERANCE = 0.02


def relative_difference(left: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference of any step, relative to the first loss, because late losses are close to zero."""
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    # NaN compares as false with everything, so it would pass any limit.
    if not all(math.isfinite(gap) for gap in gaps):
        return math.inf
    return max(gaps) / max(abs(left[0]), 1e-12)


@dataclass(frozen=True)
class Row:
    """One backend, over all its rounds."""

    model: str
    backend: str
    step_ms: float
    step_ms_by_round: list[float]
    samples_per_second: float
    over_default: PairedRatio | None
    over_best: PairedRatio | None  # None unless two or more of NCCL's own settings ran
    first_loss: float
    last_loss: float
    loss_difference: float | None  # the largest over its rounds from the default's first; None: it is the default

    def figures(self, given: argparse.Namespace, last_losses: Sequence[float]) -> list[Figure]:
        labels = {"model": self.model, "algorithm": "torch_ddp", "backend": name_of(self.backend)}
        case = case_of(given.ranks, given.device, given.sharing, **labels, rate_gbps=None, delay_ms=0.0)
        found = figures(case, {("step_time", "ms"): self.step_ms_by_round, ("loss", ""): last_losses})
        if (ratio := self.over_default) is not None:
            found.append(Figure(case, "speedup", "x", ratio.median, ratio.low, ratio.high, ratio.repetitions))
        return found


def best_tuned(turns: Turns[TurnResult], model: str, backends: Sequence[Backend]) -> str | None:
    """The fastest of NCCL's own settings. A setting that failed has fewer rounds and is not considered."""
    own = {one.name: turns.of(model, one.name) for one in backends if one.is_own_tcp}
    most = max(map(len, own.values()), default=0)
    whole = {name: _median_ms(found) for name, found in own.items() if found and len(found) == most}
    return min(whole, key=lambda name: whole[name]) if len(own) > 1 and whole else None


def _median_ms(turns: Sequence[TurnResult]) -> float:
    return statistics.median(seconds for turn in turns for seconds in turn.step_seconds) * 1e3


def rows_of(turns: Turns[TurnResult], model: str, backends: Sequence[Backend], samples_a_step: int) -> list[Row]:
    """The first backend is NCCL's default."""
    default, best = backends[0].name, best_tuned(turns, model, backends)

    def ratio(name: str, baseline: str | None) -> PairedRatio | None:
        pairs = turns.pairs(model, baseline, name) if baseline not in (None, name) else []
        return paired_ratio([one.step_ms for one, _ in pairs], [other.step_ms for _, other in pairs]) if pairs else None

    rows = []
    reference = turns.of(model, default)[:1]
    for backend in backends:
        if not (mine := turns.of(model, backend.name)):
            continue
        gaps = [relative_difference(one.losses, other.losses) for one in reference for other in mine]
        rows.append(
            Row(
                model=model,
                backend=backend.name,
                step_ms=_median_ms(mine),
                step_ms_by_round=[turn.step_ms for turn in mine],
                samples_per_second=samples_a_step / (_median_ms(mine) * 1e-3),
                over_default=ratio(backend.name, default),
                over_best=ratio(backend.name, best) if backend.is_ours else None,
                first_loss=mine[0].losses[0],
                last_loss=mine[0].losses[-1],
                loss_difference=None if backend.name == default else max(gaps, default=None),
            )
        )
    return rows


def loss_faults(rows: Sequence[Row], own_spread: float, tolerance: float) -> list[str]:
    """`own_spread`: the difference between rounds of NCCL's default, which is due to the order of summation."""
    # If even the default's losses are NaN, nothing can be compared, and nothing may pass.
    allowed = max(tolerance, own_spread) if math.isfinite(own_spread) else tolerance
    return [
        f"losses of {row.backend} with {row.model} differ from NCCL's default by {row.loss_difference:.3g} (relative to"
        f" the first loss); allowed {allowed:.3g}, rounds of NCCL's default differ by {own_spread:.3g}"
        for row in rows
        if row.loss_difference is not None and row.loss_difference > allowed
    ]


def _times(ratio: PairedRatio | None) -> str:
    return MISSING if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


COLUMNS: tuple[Column[Row], ...] = (
    Column("model", "", lambda row: row.model, left=True),
    Column("backend", "", lambda row: row.backend, left=True),
    Column("step", "ms", lambda row: format_ms(row.step_ms)),
    Column("samples", "/s", lambda row: f"{row.samples_per_second:.4g}"),
    Column("over default", "x", lambda row: _times(row.over_default)),
    Column(f"over {BEST_TUNED_NAME}", "x", lambda row: _times(row.over_best), optional=True),
    Column("first loss", "", lambda row: f"{row.first_loss:.6f}"),
    Column("last loss", "", lambda row: f"{row.last_loss:.6f}"),
    Column("loss diff", "largest", lambda row: number(row.loss_difference, ".3g"), optional=True),
)


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    parser = parser_of("networks", "Trains with torch's DDP over several networks, and compares losses and step times.")
    add_ranks(parser)
    add_training(parser, ("mlp",), "mlp")
    add_steps(add_length(parser, rounds=2, time_limit_s=420.0, timeout_s=180.0), steps=25, warmup=5)
    parser.add_argument(
        "--tuned",
        default=DEFAULT_TUNED,
        help="hand-tuned NCCL as THREADSxSOCKETS[xCHANNELS], or several with commas; best: the settings of"
        f" bagua-net-bench --nccl --tuned best; none (default {DEFAULT_TUNED})",
    )
    parser.add_argument(
        "--tcp-only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="switch P2P and shared memory off and use loopback: a stand-in for one GPU per host (default: yes)",
    )
    parser.add_argument(
        "--tolerance",
        type=within(float, 0.0, 10.0),
        help="allowed relative difference of a loss (default: 0 with 2 ranks, whose sums have one order, else"
        f" {DEFAULT_TOLERANCE}); never below what rounds of NCCL's default differ by",
    )
    output = add_results(parser)
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
    given = parser.parse_args(words)
    choose_device(parser, given, gpus)
    check_results(parser, given, "--output-dir")
    if given.tolerance is None:
        given.tolerance = 0.0 if given.ranks <= EXACT_RANKS else DEFAULT_TOLERANCE
    given.algorithms = (REFERENCE,)
    given.deterministic = True  # two runs are compared number by number
    return given


def backends_of(given: argparse.Namespace) -> list[Backend]:
    """Raises ValueError: --tuned names no setting."""
    tuned = tuned_settings([given.tuned])
    own = make_backends(library=None, tuned=tuned, variants=[], with_shared_memory=False)
    return [*own, bagua_net_by_activation()]


class NetworkRun:
    def __init__(self, given: argparse.Namespace, backends: Sequence[Backend], folder: Path) -> None:
        self._given, self._folder = given, folder
        self.backends = {backend.name: backend for backend in backends}
        self.turns: Turns[TurnResult] = Turns()
        self.networks: dict[str, dict[str, None]] = {}  # of each backend, as NCCL's logs have them
        self.facts: Mapping[str, Any] = {}

    def turn(self, model: str, name: str, number: int) -> TurnResult:
        given, backend = self._given, self.backends[name]
        logs = self._folder / f"{''.join(one if one.isalnum() else '-' for one in name)}.round{number}"
        logs.mkdir(parents=True, exist_ok=True)
        team, files = start_on_network(given, backend, logs, tcp_only=given.tcp_only)
        failed = True
        try:
            self.facts = team.facts
            size = {**size_of(given, model), "steps": given.steps, "warmup": given.warmup}
            events = team.ask("turn", given.timeout, algorithm=REFERENCE, **size)
            failed = False
        finally:
            team.close(failed=failed)
        found = turn_result(model, name, number, events)
        if not found.replicas_agree:
            self.turns.errors.append(f"{name} with {model}, round {number}: the ranks ended with different parameters")
        if given.device == "cuda":
            if error := network_fault(name, backend, files):
                self.turns.errors.append(error)
            seen = self.networks.setdefault(name, {})
            seen.update(dict.fromkeys(read_proof_file(file).summary() for file in files))
        return found


def main(words: Sequence[str] | None = None) -> int:
    given = parse_options(words)
    try:
        backends = backends_of(given)
    except ValueError as error:
        print(f"measure networks: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="measure-networks-") as temporary:
        run = NetworkRun(given, backends, given.output_dir or Path(temporary))
        with Progress(given.rounds * len(given.model) * len(backends)) as progress:
            plan = dict.fromkeys(given.model, tuple(run.backends))
            run.turns.take(plan, given.rounds, run.turn, time_limit_s=given.time_limit, progress=progress)
    turns = run.turns
    rows: list[Row] = []
    found: list[Figure] = []
    lines = [f"network of {name}: {'; '.join(seen)}" for name, seen in run.networks.items()]
    for model in given.model:
        first, *others = turns.of(model, backends[0].name) or [None]
        own = max((relative_difference(first.losses, one.losses) for one in others if first and one), default=0.0)
        mine = rows_of(turns, model, backends, given.ranks * size_of(given, model)["batch_size"])
        turns.errors += loss_faults(mine, own, given.tolerance)
        if best := best_tuned(turns, model, backends):
            lines.append(f"{BEST_TUNED_NAME} with {model}: {best}")
        for row in mine:
            found += row.figures(given, [turn.losses[-1] for turn in turns.of(model, row.backend)])
        rows += mine
    return Report(
        title=f"DDP training of {', '.join(given.model)} on {given.ranks} ranks, by network backend",
        heading=ranks_text(given, run.facts),
        table=render_rows(
            rows,
            COLUMNS,
            begins_block=lambda before, row: before.model != row.model,
            is_loud=lambda row: bool(row.loss_difference and row.loss_difference > given.tolerance),
            colour=shows_colour(sys.stdout),
        ),
        figures=found,
        lines=lines,
        notes=turns.notes,
        errors=turns.errors,
        facts=run.facts,
        rows=rows,
        samples=turns.all(),
    ).publish(given)
