"""`measure memory`: the memory that each algorithm needs in addition to plain training, in bytes per parameter,
compared with what the documentation states.

Plain training is the same model and optimizer without Bagua: parameters, gradients and the state of the optimizer.
`kept` is allocated between steps, `at the peak` is the maximum within a step; both with gradients that are reused. With
`fresh gradients`, which autograd allocates in each step after zero_grad(set_to_none=True), the gradients that wait for
their bucket are added. An algorithm that needs more than is stated is an error. If the model is so small that noise
would hide a copy of its parameters, the verdict is "too small to tell".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua.net.bench.api import (
    BenchError,
    Column,
    Event,
    Figure,
    Label,
    Progress,
    Turns,
    figures,
    names_of,
    render_rows,
    shows_colour,
    within,
)
from measure.memory.catalogue import ADAM, CASES, QADAM, SGD
from measure.memory_probe import ALLOCATOR_SETTINGS
from measure.options import add_ranks, add_results, check_results, choose_device, parser_of
from measure.ranks.renewed_team import RenewedTeam, keeping
from measure.ranks.team import on_this_host
from measure.report import Report, ranks_text, sharing_notes
from measure.results import case_of, name_of

_TIMEOUT_S = 120.0
_MIB = 1 << 20
# What Python's objects, threads, groups of an algorithm's own and the allocator's rounding may add.
_NOISE_BYTES = 4 * _MIB
# gloo's own buffers are in what is measured on a CPU; gradient_allreduce, without scratch, shows how large they are.
GLOO_BYTES = 6 * _MIB
_COPY_BYTES = 4  # of a parameter
PLAIN = "plain training"


@dataclass(frozen=True)
class Row:
    """All in bytes, beyond what plain training with the same optimizer has; the rank with most."""

    case: str
    parameters: int
    largest_bucket: int  # elements
    kept: int
    kept_stated: float
    peak: int
    peak_stated: float
    peak_with_fresh_gradients: int
    transport: int  # what the library that communicates may have in the peak

    @property
    def exceeds(self) -> bool:
        """More than is stated, by more than noise."""
        return self.kept > self.kept_stated + _NOISE_BYTES or self.peak > self.peak_stated + self.allowance

    @property
    def allowance(self) -> int:
        """Bytes that may come on top without being the algorithm's."""
        return self.transport + _NOISE_BYTES

    @property
    def verdict(self) -> str:
        if self.exceeds:
            return "MORE"
        # In a smaller model one more copy of all parameters, the least fault worth finding, would go unseen.
        tells = _COPY_BYTES * self.parameters > self.allowance
        return f"as stated, within {self.allowance / _MIB:g} MiB" if tells else "too small to tell"

    def figures(self, case: dict[str, Label]) -> list[Figure]:
        return figures(
            {"model": "linear", "algorithm": name_of(self.case), "parameters": self.parameters, **case},
            {
                ("memory", "MiB"): [self.peak / _MIB],
                ("memory_kept", "MiB"): [self.kept / _MIB],
                ("memory_kept_stated", "MiB"): [self.kept_stated / _MIB],
                ("memory_fresh_gradients", "MiB"): [self.peak_with_fresh_gradients / _MIB],
                ("memory_per_parameter", "B"): [self.peak / self.parameters],
            },
        )


@dataclass(frozen=True)
class Measured:
    """Of one case, by rank: with gradients that stay where they are, and with ones that are made anew in each step."""

    in_place: Sequence[Event]
    fresh: Sequence[Event]


def row_of(case: str, found: Measured, plain: Measured, ranks: int, device: str, transport: int) -> Row:
    """`plain`: of the same model without Bagua."""

    def most(name: str, events: Sequence[Event], without: Sequence[Event]) -> int:
        return max(int(event[name]) - int(other[name]) for event, other in zip(events, without, strict=True))

    events = found.in_place
    stated = CASES[case].stated
    parameters, largest = int(events[0]["parameters"]), max(events[0]["buckets"])
    return Row(
        case=case,
        parameters=parameters,
        largest_bucket=largest,
        kept=most("kept", events, plain.in_place),
        kept_stated=stated.kept_bytes(parameters, largest, ranks, device),
        peak=most("peak", events, plain.in_place),
        peak_stated=stated.peak_bytes(parameters, largest, ranks, device),
        peak_with_fresh_gradients=most("peak", found.fresh, plain.fresh),
        transport=transport,
    )


def _per_parameter(count: float, row: Row) -> str:
    return f"{count / row.parameters:+.2f}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("algorithm", "", lambda row: row.case, left=True),
    Column("kept", "B/parameter", lambda row: _per_parameter(row.kept, row)),
    Column("stated", "B/parameter", lambda row: _per_parameter(row.kept_stated, row)),
    Column("at the peak", "B/parameter", lambda row: _per_parameter(row.peak, row)),
    Column("stated", "at most", lambda row: _per_parameter(row.peak_stated, row)),
    Column("fresh gradients", "at the peak", lambda row: _per_parameter(row.peak_with_fresh_gradients, row)),
    Column("largest bucket", "MiB", lambda row: f"{row.largest_bucket * 4 / _MIB:.1f}"),
    Column("", "", lambda row: row.verdict, left=True),
)


def parse_options(words: Sequence[str] | None, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    parser = parser_of("memory", "What each algorithm needs beyond plain training, measured and as stated.")
    parser.add_argument(
        "--algorithms",
        type=names_of("algorithm", list(CASES)),
        default=tuple(CASES),
        metavar="LIST",
        help=f"of {', '.join(CASES)} (default all)",
    )
    add_ranks(parser, most=16)
    parser.add_argument("--layers", type=within(int, 1, 10_000), default=24, help="linear layers (default 24)")
    parser.add_argument("--width", type=within(int, 1, 65_536), default=1024, help="of each (default 1024)")
    parser.add_argument("--steps", type=within(int, 1, 1000), default=6, help="that are measured (default 6)")
    add_results(parser)
    given = parser.parse_args(words)
    choose_device(parser, given, gpus)
    check_results(parser, given)
    return given


def _optimizer(case: str) -> str:
    """Of the plain training that a case is compared with."""
    return ADAM if CASES[case].optimizer in (ADAM, QADAM) else SGD


def main(words: Sequence[str] | None = None, gpus: Callable[[], int] | None = None) -> int:
    given = parse_options(words, gpus)
    plan = {
        kind: [PLAIN, *(case for case in given.algorithms if _optimizer(case) == kind)]
        for kind in (SGD, ADAM)
        if kind in map(_optimizer, given.algorithms)
    }

    ranks = RenewedTeam(on_this_host("measure.memory.worker", given, _TIMEOUT_S, ALLOCATOR_SETTINGS))

    def measure(optimizer: str, name: str, _round: int) -> Measured:
        case, kind = (None, optimizer) if name == PLAIN else (name, CASES[name].optimizer)
        size = {"layers": given.layers, "width": given.width, "steps": given.steps}
        first = ranks.starts == 0
        in_place, fresh = (
            ranks.ask("measure", _TIMEOUT_S, case=case, optimizer=kind, set_to_none=set_to_none, **size)
            for set_to_none in (False, True)
        )
        # What these processes do once is in no figure.
        return measure(optimizer, name, _round) if first else Measured(in_place, fresh)

    turns: Turns[Measured] = Turns()
    try:
        with Progress(sum(map(len, plan.values()))) as progress, keeping(turns, ranks):
            turns.take(plan, 1, measure, progress=progress)
    except BenchError as error:
        print(f"measure memory: {error}", file=sys.stderr)
        return 1
    transport = GLOO_BYTES if given.device == "cpu" else 0
    rows = [
        row_of(name, found, plain, given.ranks, given.device, transport)
        for kind, names in plan.items()
        for name in names[1:]
        for found, plain in turns.pairs(kind, name, PLAIN)
    ]
    labels = case_of(given.ranks, given.device, given.sharing)
    return Report(
        title=f"Memory of training beyond plain training, {given.ranks} ranks",
        heading=f"{ranks_text(given, ranks.facts)}; {given.layers} layers of float32",
        table=render_rows(rows, COLUMNS, is_loud=lambda row: row.exceeds, colour=shows_colour(sys.stdout)),
        figures=[figure for row in rows for figure in row.figures(labels)],
        notes=sharing_notes(given),
        errors=[*turns.errors, *(f"{row.case} needs more than is stated" for row in rows if row.exceeds)],
        facts=ranks.facts,
        parameters={"dtype": "float32"},
        rows=rows,
    ).publish(given)
