"""The command line of compare_convergence.py: parsing, defaults and every check that needs no rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_option import add_sharing_option, chosen_device

from bagua.net.bench.argument_types import names_of, within
from bagua.net.bench.export import check_output_files, check_writable
from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.plot import PlotUnavailableError, check_plot_path
from convergence_comparison.catalogue import (
    ACCURACY_LIMIT_POINTS,
    CASES,
    DEFAULT_CASES,
    DEFAULT_TASKS,
    LOSS_LIMIT_PERCENT,
    TASKS,
)

_EPILOG = """\
tasks:
{tasks}

One process group for all; with every seed each algorithm trains each task from the same start with the same batches, in
an order that rotates, until the learning rate is zero. What is evaluated is the mean of the ranks' models. An algorithm
holds if its mean over the seeds is at most {points:g} points of accuracy and {percent:g} % of loss worse than gradient
all-reduce with the same optimizer.

examples:
  python tools/convergence/compare_convergence.py --nproc-per-node 4 --json convergence.json --plot convergence.png
  python tools/convergence/compare_convergence.py --tasks digits --algorithms bytegrad,async --seeds 3

exit status: 0, or 1 if a training failed, figures are missing or an algorithm falls short, or 2 if an option was wrong.
"""


@dataclass(frozen=True)
class Options:
    ranks: int
    device: str  # "cuda" or "cpu"
    tasks: tuple[str, ...]
    cases: tuple[str, ...]  # as chosen; baselines come on top
    seeds: int
    steps: int | None  # None: the task's epochs
    timeout_s: float
    time_limit_s: float
    json_path: Path | None
    details_path: Path | None
    plot_path: Path | None
    sharing: GpuSharing | None = None


def make_parser() -> argparse.ArgumentParser:
    tasks = "\n".join(f"  {name:<12} {task.about}, {task.epochs} epochs" for name, task in TASKS.items())
    parser = argparse.ArgumentParser(
        prog="compare_convergence.py",
        description="Does an algorithm train as well as gradient all-reduce? On data that packages ship, to the end.",
        epilog=_EPILOG.format(tasks=tasks, points=ACCURACY_LIMIT_POINTS, percent=LOSS_LIMIT_PERCENT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tasks",
        type=names_of("task", list(TASKS)),
        default=DEFAULT_TASKS,
        metavar="LIST",
        help=f"default {','.join(DEFAULT_TASKS)}",
    )
    parser.add_argument(
        "--algorithms",
        type=names_of("algorithm", list(CASES)),
        default=DEFAULT_CASES,
        metavar="LIST",
        help=f"of {', '.join(CASES)} (default all); what they are compared with is trained as well",
    )
    parser.add_argument("--seeds", type=within(int, 1, 100), default=5, metavar="N", help="default 5")
    parser.add_argument(
        "--nproc-per-node", type=within(int, 2, 4), default=2, metavar="N", help="ranks, 2 to 4 (default 2)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA if every rank has a GPU"
    )
    add_sharing_option(parser)
    length = parser.add_argument_group("how long")
    length.add_argument(
        "--steps",
        type=within(int, 1, 10_000_000),
        metavar="N",
        help="steps of each training, with the schedule made for them (default: the task's epochs)",
    )
    length.add_argument(
        "--time-limit",
        type=within(float, 1.0, 86400.0),
        default=3600.0,
        metavar="S",
        help="seconds for the whole run; no training begins that is longer than what is left (default 3600)",
    )
    length.add_argument(
        "--timeout", type=within(float, 1.0, 3600.0), default=300.0, metavar="S", help="for one training (default 300)"
    )
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="PATH", help="result file: medians over the seeds and their range")
    output.add_argument("--details", type=Path, metavar="PATH", help="every training, as JSON")
    output.add_argument("--plot", type=Path, metavar="PATH", help="curves of all algorithms (.png, .svg or .pdf)")
    return parser


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> Options:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does. `gpus` counts them."""
    parser = make_parser()
    given = parser.parse_args(words)
    device = chosen_device(parser, given, gpus)
    try:
        check_output_files([("--json", given.json), ("--details", given.details)])
        if given.plot is not None:
            check_plot_path(given.plot)
            check_writable("--plot", given.plot)
    except (ValueError, PlotUnavailableError) as error:
        parser.error(str(error))
    return Options(
        ranks=given.nproc_per_node,
        device=device.type,
        sharing=device.sharing,
        tasks=given.tasks,
        cases=given.algorithms,
        seeds=given.seeds,
        steps=given.steps,
        timeout_s=given.timeout,
        time_limit_s=given.time_limit,
        json_path=given.json,
        details_path=given.details,
        plot_path=given.plot,
    )
