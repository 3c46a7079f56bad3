"""`measure optimizers`: how long an optimizer's step takes, with torch's implementations and with fuse_step, in turns.

A step is timed from call to return and, on a GPU, until the GPU has finished. `fresh` gradients are other tensors in
each step, as after zero_grad(set_to_none=True); `kept` ones are the same. How they are made is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.net.bench.api import (
    Column,
    Figure,
    Label,
    PairedRatio,
    Progress,
    Turns,
    figures,
    names_of,
    paired_ratio,
    render_rows,
    shows_colour,
    speedup,
    within,
)
from bagua.torch_api.contrib import fuse_optimizer
from measure.options import add_length, add_results, check_results, parser_of
from measure.report import Report
from measure.results import name_of

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, **options),
    "momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-3, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-3, **options),
}
# What fuse_step is compared with, and the options of both.
_THEIRS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused=True": {"fused": True},
}
OURS = {"fuse_step" if one == "for-loop" else f"fuse_step of {one}": one for one in _THEIRS}
BACKENDS = {**_THEIRS, **{ours: _THEIRS[theirs] for ours, theirs in OURS.items()}}
COMPILED = "compiled"
_BASELINES = ("for-loop", "foreach")
_WARM_UP_STEPS = 3  # states are made, kernels compiled, kept gradients taken over


class Steps:
    """One backend: its parameters, with gradients, and its optimizer."""

    def __init__(self, backend: str, optimizer: str, count: int, elements: int, device: str) -> None:
        self.device = torch.device(device)
        self.parameters = [torch.nn.Parameter(torch.ones(elements, device=self.device)) for _ in range(count)]
        made = OPTIMIZERS[optimizer](self.parameters, **BACKENDS.get(backend, {"foreach": True}))
        self.step = fuse_optimizer(made).fuse_step if backend in OURS else made.step
        if backend == COMPILED:
            self.step = torch.compile(made.step)
        self.give_gradients()

    def give_gradients(self) -> None:
        for one in self.parameters:
            one.grad = torch.full_like(one, 1e-3)

    def turn(self, steps: int, *, fresh: bool) -> float:
        """Milliseconds a step."""
        taken = 0.0
        for _ in range(steps):
            if fresh:
                self.give_gradients()
            self._wait()
            begin = time.perf_counter()
            self.step()
            self._wait()
            taken += time.perf_counter() - begin
        return taken / steps * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Row:
    """The rounds of one backend, and how many times faster it is than others."""

    case: dict[str, Label]
    backend: str
    ms: list[float]
    over: dict[str, PairedRatio]  # by baseline: the for-loop, foreach and what fuse_step replaces

    def ratio(self, baseline: str | None) -> str:
        found = None if baseline is None else self.over.get(baseline)
        return "" if found is None else f"{found.median:.2f} ({found.low:.2f}..{found.high:.2f})"

    def figures(self, device: str) -> list[Figure]:
        case = {**self.case, "device": device}
        found = figures({**case, "backend": name_of(self.backend)}, {("step_time", "ms"): self.ms})
        return found + [speedup(case, self.backend, baseline, ratio) for baseline, ratio in self.over.items()]

    @property
    def is_slow(self) -> bool:
        replaced = OURS.get(self.backend)
        return replaced is not None and self.over[replaced].high < 1


COLUMNS: list[Column[Row]] = [
    *(Column(name, "", lambda row, name=name: str(row.case[name])) for name in ("optimizer", "gradients")),
    *(Column(name, "", lambda row, name=name: str(row.case[name])) for name in ("parameters", "elements")),
    Column("backend", "", lambda row: row.backend, left=True),
    Column("step", "ms", lambda row: f"{statistics.median(row.ms):.3f}"),
    *(Column(f"than {name}", "x faster", lambda row, name=name: row.ratio(name)) for name in _BASELINES),
    Column("than replaced", "x faster", lambda row: row.ratio(OURS.get(row.backend))),
]


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("optimizers", "Times steps of optimizers, fused and not.")
    parser.add_argument(
        "--optimizers",
        type=names_of("optimizer", list(OPTIMIZERS)),
        default=("sgd", "adam"),
        metavar="NAMES",
        help=f"of {', '.join(OPTIMIZERS)} (default sgd,adam)",
    )
    parser.add_argument(
        "--gradients",
        type=names_of("kind of gradients", ("fresh", "kept")),
        default=("fresh", "kept"),
        metavar="NAMES",
        help="fresh, kept (default both)",
    )
    for name, most, default, about in (
        ("--parameters", 1_000_000, [10, 1000, 10_000], "how many tensors (default 10 1000 10000)"),
        ("--elements", 1 << 30, [256], "of each tensor (default 256)"),
    ):
        parser.add_argument(name, type=within(int, 1, most), nargs="+", default=default, metavar="N", help=about)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where they are (default cpu)")
    add_length(parser, rounds=7).add_argument(
        "--steps",
        type=within(int, 1, 10**9),
        default=20_000,
        metavar="N",
        help="in a turn, times the number of tensors, and fewer of large ones (default 20000)",
    )
    parser.add_argument(
        "--compile-up-to",
        type=within(int, 0, 1_000_000),
        default=0,
        metavar="N",
        help="measure torch.compile(optimizer.step) as well, up to N tensors (default 0); 1000 take minutes to compile",
    )
    add_results(parser)
    given = parser.parse_args(words)
    check_results(parser, given)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, this machine shows none; use --device cpu")
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = parse_options(words)
    names = ("optimizer", "gradients", "parameters", "elements")
    rows = []
    cases = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(given.optimizers, given.gradients, given.parameters, given.elements)
    ]
    with Progress(len(cases) * len(BACKENDS) * given.rounds) as progress:
        for case in cases:
            rows += _rows(case, given, progress)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return Report(
        title="Steps of optimizers, fused and not",
        heading=f"{device}{threads}, torch {torch.__version__}, float32",
        table=render_rows(
            rows,
            COLUMNS,
            begins_block=lambda before, row: before.case != row.case,
            is_loud=lambda row: row.is_slow,
            colour=shows_colour(sys.stdout),
        ),
        figures=[figure for row in rows for figure in row.figures(given.device)],
        facts={"device": device, "torch": torch.__version__},
        parameters={"threads": torch.get_num_threads()},
        rows=rows,
    ).publish(given)


def _rows(case: dict[str, Any], given: argparse.Namespace, progress: Progress) -> list[Row]:
    count, elements = case["parameters"], case["elements"]
    backends = [*BACKENDS, *([COMPILED] if count <= given.compile_up_to else [])]
    made = {one: Steps(one, case["optimizer"], count, elements, given.device) for one in backends}
    steps = max(1, given.steps * 256 // (count * max(256, elements)))
    fresh = case["gradients"] == "fresh"
    for one in made.values():
        one.turn(_WARM_UP_STEPS, fresh=fresh)
    turns: Turns[float] = Turns()
    name = f"{case['optimizer']}, {count} parameters of {elements}"
    turns.take(
        {name: backends}, given.rounds, lambda _case, one, _round: made[one].turn(steps, fresh=fresh), progress=progress
    )
    baselines = {
        one: dict.fromkeys(base for base in (*_BASELINES, OURS.get(one)) if base not in (None, one)) for one in backends
    }
    return [
        Row(
            case,
            one,
            turns.of(name, one),
            {base: paired_ratio(turns.of(name, base), turns.of(name, one)) for base in baselines[one] if base},
        )
        for one in backends
    ]
