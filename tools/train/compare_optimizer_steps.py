"""How long an optimizer's step takes: torch's implementations and fuse_step, in turns.

    python tools/train/compare_optimizer_steps.py
    python tools/train/compare_optimizer_steps.py --device cuda --compile --json steps.json

A step is timed from call to return and, on a GPU, until the GPU has finished. In each round every backend makes its
steps, in another order, so a ratio is that of neighbours in time. `fresh` gradients are other tensors in each step, as
after zero_grad(set_to_none=True); `kept` ones are the same. How they are made is not timed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

import figures as result_figures
import torch
from aligned_table import Column, render

from bagua.net.bench.argument_types import names_of, within
from bagua.net.bench.export import check_writable
from bagua.net.bench.figures import figures, speedup
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.paired_ratio import PairedRatio, paired_ratio
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import Figure
from bagua.torch_api.contrib import fuse_optimizer

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, **options),
    "momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-3, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-3, **options),
}
OURS = {"fuse_step": {}, "fuse_step of fused=True": {"fused": True}}
BACKENDS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused=True": {"fused": True},
    **OURS,
}
COMPILED = "compiled"


@dataclass(frozen=True)
class Row:
    """The rounds of one backend, with those of the for-loop and of foreach."""

    optimizer: str
    gradients: str
    parameters: int
    backend: str
    ms: tuple[float, ...]
    over_loop: PairedRatio
    over_foreach: PairedRatio


class Case:
    """One backend: its parameters, with gradients, and its optimizer."""

    def __init__(self, backend: str, optimizer: str, count: int, given: argparse.Namespace) -> None:
        self.device = torch.device(given.device)
        side = given.elements
        self.parameters = [torch.nn.Parameter(torch.ones(side, device=self.device)) for _ in range(count)]
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


def compare(optimizer: str, gradients: str, count: int, given: argparse.Namespace) -> list[Row]:
    backends = [*BACKENDS, *([COMPILED] if given.compile else [])]
    cases = {backend: Case(backend, optimizer, count, given) for backend in backends}
    steps = max(1, given.steps // count)
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    order = random.Random(count)
    for number in range(given.rounds + 1):
        for backend in order.sample(backends, len(backends)):
            # The first round is the warm-up: states are made, kernels compiled, kept gradients taken over.
            taken = cases[backend].turn(steps if number else 3, fresh=gradients == "fresh")
            if number:
                times[backend].append(taken)
    loop, foreach = times["for-loop"], times["foreach"]
    return [
        Row(optimizer, gradients, count, one, tuple(ms), paired_ratio(loop, ms), paired_ratio(foreach, ms))
        for one, ms in times.items()
    ]


COLUMNS: list[Column[Row]] = [
    Column("optimizer", "", lambda row: row.optimizer, left=True),
    Column("gradients", "", lambda row: row.gradients, left=True),
    Column("parameters", "", lambda row: str(row.parameters)),
    Column("backend", "", lambda row: row.backend, left=True),
    Column("step", "ms", lambda row: f"{sorted(row.ms)[len(row.ms) // 2]:.3f}"),
    Column("than for-loop", "x faster", lambda row: _ratio(row.over_loop)),
    Column("than foreach", "x faster", lambda row: _ratio(row.over_foreach)),
]


def _ratio(ratio: PairedRatio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


def figures_of(row: Row, given: argparse.Namespace) -> list[Figure]:
    case = {"optimizer": row.optimizer, "gradients": row.gradients, "parameters": row.parameters}
    case |= {"elements": given.elements, "device": given.device}
    backend = result_figures.name_of(row.backend)
    found = figures({**case, "backend": backend}, {("step_time", "ms"): row.ms})
    for baseline, ratio in (("for-loop", row.over_loop), ("foreach", row.over_foreach)):
        if row.backend != baseline:
            found.append(speedup(case, row.backend, baseline, ratio))
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time steps of optimizers, fused and not.", allow_abbrev=False)
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
    parser.add_argument(
        "--parameters",
        type=within(int, 1, 1_000_000),
        nargs="+",
        default=[10, 1000, 10_000],
        metavar="N",
        help="how many tensors (default 10 1000 10000)",
    )
    parser.add_argument("--elements", type=within(int, 1, 1 << 30), default=256, help="of each tensor (default 256)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where they are (default cpu)")
    parser.add_argument("--rounds", type=within(int, 1, 1000), default=7, help="of all backends (default 7)")
    parser.add_argument(
        "--steps",
        type=within(int, 1, 10**9),
        default=20_000,
        metavar="N",
        help="in a turn, times the number of tensors (default 20000)",
    )
    parser.add_argument("--compile", action="store_true", help="measure torch.compile(optimizer.step) as well")
    parser.add_argument("--json", type=Path, metavar="PATH", help="result file")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser()
    given = parser.parse_args(words)
    try:
        if given.json is not None:
            check_writable("--json", given.json)
    except ValueError as error:
        parser.error(str(error))
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, this machine shows none; use --device cpu")
    rows = []
    with Progress(len(given.optimizers) * len(given.gradients) * len(given.parameters)) as progress:
        for optimizer in given.optimizers:
            for gradients in given.gradients:
                for count in given.parameters:
                    progress.advance(f"{optimizer}, {count} parameters", 0)
                    rows += compare(optimizer, gradients, count, given)
                    progress.advance(optimizer)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    print(f"{device}{threads}, torch {torch.__version__}, {given.elements} float32 elements a parameter\n")
    print(render(rows, COLUMNS, block=lambda row: (row.optimizer, row.gradients, row.parameters), is_loud=_is_slow))
    if given.json is not None:
        result_figures.write(
            given.json,
            "Steps of optimizers, fused and not",
            [one for row in rows for one in figures_of(row, given)],
            machine=describe_machine(),
            ranks={"device": device, "torch": torch.__version__},
            parameters=vars(given) | {"threads": torch.get_num_threads()},
        )
        print(f"\nwritten: {given.json}")
    return 0


def _is_slow(row: Row) -> bool:
    return row.backend in OURS and row.over_foreach.high < 1


if __name__ == "__main__":
    sys.exit(main())
