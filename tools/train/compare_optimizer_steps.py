"""How long an optimizer's step takes: torch's implementations and fuse_step, in turns.

    python tools/train/compare_optimizer_steps.py
    python tools/train/compare_optimizer_steps.py --device cuda --compile-up-to 1000 --json steps.json

A step is timed from call to return and, on a GPU, until the GPU has finished. In each round every backend makes its
steps, in another order, so a ratio is that of neighbours in time. `fresh` gradients are other tensors in each step, as
after zero_grad(set_to_none=True); `kept` ones are the same. How they are made is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

import figures as result_figures
import torch
from aligned_table import Column, render
from optimizer_steps.rounds import OPTIMIZERS, OURS, Row, compare

from bagua.net.bench.argument_types import names_of, within
from bagua.net.bench.export import check_writable
from bagua.net.bench.figures import figures, speedup
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import Figure
from bagua.net.bench.verdict import PairedRatio

COLUMNS: list[Column[Row]] = [
    Column("optimizer", "", lambda row: row.optimizer, left=True),
    Column("gradients", "", lambda row: row.gradients, left=True),
    Column("parameters", "", lambda row: str(row.parameters)),
    Column("elements", "", lambda row: str(row.elements)),
    Column("backend", "", lambda row: row.backend, left=True),
    Column("step", "ms", lambda row: f"{sorted(row.ms)[len(row.ms) // 2]:.3f}"),
    Column("than for-loop", "x faster", lambda row: _ratio(row.over_loop)),
    Column("than foreach", "x faster", lambda row: _ratio(row.over_foreach)),
    Column("than replaced", "x faster", lambda row: "" if row.over_replaced is None else _ratio(row.over_replaced)),
]


def _ratio(ratio: PairedRatio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


def figures_of(row: Row, given: argparse.Namespace) -> list[Figure]:
    case = {"optimizer": row.optimizer, "gradients": row.gradients, "parameters": row.parameters}
    case |= {"elements": row.elements, "device": given.device}
    backend = result_figures.name_of(row.backend)
    found = figures({**case, "backend": backend}, {("step_time", "ms"): row.ms})
    for baseline, ratio in (("for-loop", row.over_loop), ("foreach", row.over_foreach)):
        if row.backend != baseline and OURS.get(row.backend) != baseline:
            found.append(speedup(case, row.backend, baseline, ratio))
    if row.over_replaced is not None:
        found.append(speedup(case, row.backend, OURS[row.backend], row.over_replaced))
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
    parser.add_argument(
        "--elements",
        type=within(int, 1, 1 << 30),
        nargs="+",
        default=[256],
        metavar="N",
        help="of each tensor (default 256)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where they are (default cpu)")
    parser.add_argument("--rounds", type=within(int, 1, 1000), default=7, help="of all backends (default 7)")
    parser.add_argument(
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
    cases = list(itertools.product(given.optimizers, given.gradients, given.parameters, given.elements))
    with Progress(len(cases)) as progress:
        for optimizer, gradients, count, elements in cases:
            progress.advance(f"{optimizer}, {count} parameters of {elements}", 0)
            rows += compare(optimizer, gradients, count, elements, given)
            progress.advance(optimizer)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    print(f"{device}{threads}, torch {torch.__version__}, float32\n")
    print(render(rows, COLUMNS, block=_case, is_loud=_is_slow))
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


def _case(row: Row) -> tuple[object, ...]:
    return row.optimizer, row.gradients, row.parameters, row.elements


def _is_slow(row: Row) -> bool:
    return row.over_replaced is not None and row.over_replaced.high < 1


if __name__ == "__main__":
    sys.exit(main())
