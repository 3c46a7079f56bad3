"""The command line of the sweep: parsing, defaults by device, and every check that needs no network."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core_comparison.catalogue import ALGORITHMS, ALL_REDUCE, GROUPS, MODELS
from core_comparison.options import DEFAULT_TOLERANCE, Options, warmup_problem
from device_option import add_sharing_option, chosen_device
from netlab import parse_delay_ms, parse_rate_mbit

from bagua.net.bench.argument_types import names_of, within
from bagua.net.bench.export import check_output_files, make_folder
from bagua.net.bench.plot import PlotUnavailableError, check_plot_path

DEFAULT_RATES = "1G,10G,25G,100G"
DEFAULT_DELAYS = "0,1ms,5ms,20ms"
_DEFAULT_MODELS = {"cpu": ("wide",), "cuda": ("vgg16", "gpt2")}
# GPUs start more slowly and train larger models.
_DEFAULT_TIME_LIMIT_S = {"cpu": 720.0, "cuda": 540.0}
_TURN_TIMEOUT_S = 240.0
_MBIT_PER_GBIT = 1e3

_EPILOG = """\
examples:
  make sweep                                                         CPUs, in some twelve minutes
  make sweep SWEEP_ARGS="--rates 1G,10G --delays 0,5ms --time-limit 180"
  make sweep SWEEP_ARGS="--plan"                                     what would be measured, and how long it takes
  make sweep SWEEP_ARGS="--device cuda --rates 10G,25G,100G"         a GPU for each rank, NCCL through Bagua-Net
  make sweep SWEEP_ARGS="--device cuda --share-gpus --ranks 4"       four ranks on the GPUs that there are

Ctrl-C or SIGTERM ends it early, with the tables of what was measured.

exit status: 0, or 1 if an algorithm failed or broke what it promises, nothing was measured or it was ended early, or 2
if an option was wrong.
"""


@dataclass(frozen=True)
class SweepOptions:
    """`comparison` is what is trained in each network; its time limit is of one network."""

    comparison: Options
    rates_gbit: tuple[float, ...]
    delays_ms: tuple[float, ...]
    time_limit_s: float
    only_plan: bool
    json_path: Path | None
    details_path: Path | None
    plot_path: Path | None
    output_folder: Path | None


def _several(parse: Callable[[str], float], factor: float) -> Callable[[str], tuple[float, ...]]:
    def convert(text: str) -> tuple[float, ...]:
        try:
            return tuple(dict.fromkeys(parse(part) * factor for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="PYTHONPATH=tools python -m sweep",
        description="Trains with every algorithm in networks of several rates and delays (network namespaces on this"
        " machine; needs root), and says which one is the fastest where.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    add_sharing_option(parser)
    parser.add_argument(
        "--ranks", type=within(int, 2, 64), default=2, metavar="N", help="hosts, a rank each (default 2)"
    )
    networks = parser.add_argument_group("networks")
    networks.add_argument(
        "--rates",
        type=_several(parse_rate_mbit, 1 / _MBIT_PER_GBIT),
        default=DEFAULT_RATES,
        metavar="LIST",
        help=f"of every link (default {DEFAULT_RATES})",
    )
    networks.add_argument(
        "--delays",
        type=_several(parse_delay_ms, 1.0),
        default=DEFAULT_DELAYS,
        metavar="LIST",
        help=f"of every packet, one way (default {DEFAULT_DELAYS})",
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model",
        type=names_of("model", list(MODELS)),
        metavar="LIST",
        help=f"default {','.join(_DEFAULT_MODELS['cpu'])}; with CUDA {','.join(_DEFAULT_MODELS['cuda'])}",
    )
    what.add_argument("--length", type=within(int, 1, 65536), metavar="N", help="size of the model (default: its own)")
    what.add_argument("--batch-size", type=within(int, 1, 65536), metavar="N", help="per rank (default: the model's)")
    what.add_argument(
        "--algorithms",
        "--backends",  # its former name
        type=names_of("algorithm", list(ALGORITHMS), GROUPS),
        default=GROUPS["algorithms"],
        metavar="LIST",
        help=f"must have {ALL_REDUCE}, which is gradient all-reduce (default algorithms)",
    )
    length = parser.add_argument_group("how long")
    length.add_argument("--steps", type=within(int, 1, 10_000), default=4, help="timed steps of a turn (default 4)")
    length.add_argument("--warmup", type=within(int, 0, 1000), default=3, help="steps before them (default 3)")
    length.add_argument(
        "--rounds",
        type=within(int, 1, 100),
        default=3,
        help="turns of each algorithm in each network, at most: as many as fit (default 3)",
    )
    length.add_argument(
        "--time-limit",
        type=within(float, 10.0, 86400.0),
        metavar="S",
        help="for all networks together, which share it equally; one round of each is run in any case (default"
        f" {_DEFAULT_TIME_LIMIT_S['cpu']:g}, with CUDA {_DEFAULT_TIME_LIMIT_S['cuda']:g})",
    )
    length.add_argument("--plan", action="store_true", help="say what would be measured, and end")
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="PATH", help="result file: medians and their range")
    output.add_argument("--details", type=Path, metavar="PATH", help="every step of every turn, as JSON")
    output.add_argument("--plot", type=Path, metavar="PATH", help="who wins where (.png, .svg, .pdf)")
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep the ranks' NCCL logs there")
    return parser


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> SweepOptions:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does. `gpus` counts them."""
    parser = make_parser()
    given = parser.parse_args(words)
    device = chosen_device(parser, given, gpus, ranks_option="--ranks")
    if ALL_REDUCE not in given.algorithms:
        parser.error(f"--algorithms lacks {ALL_REDUCE}, which all others are compared with; add it")
    if problem := warmup_problem(given.algorithms, given.warmup):
        parser.error(problem)
    try:
        if not given.plan:
            if given.plot is not None:
                check_plot_path(given.plot)
            check_output_files([("--json", given.json), ("--details", given.details), ("--plot", given.plot)])
        if given.output_dir is not None:
            make_folder("--output-dir", given.output_dir)
    except (ValueError, PlotUnavailableError) as error:
        parser.error(str(error))
    comparison = Options(
        ranks=given.ranks,
        device=given.device,
        models=given.model or _DEFAULT_MODELS[given.device],
        algorithms=given.algorithms,
        baseline=ALL_REDUCE,
        steps=given.steps,
        warmup=given.warmup,
        rounds=given.rounds,
        batch_size=given.batch_size,
        dtype=None,
        length=given.length,
        network="tcp" if given.device == "cuda" else None,
        seed=1,
        deterministic=False,
        tolerance=DEFAULT_TOLERANCE,
        timeout_s=_TURN_TIMEOUT_S,
        time_limit_s=0.0,
        json_path=None,
        details_path=None,
        trace_folder=None,
        output_folder=None,
        sharing=device.sharing,
    )
    return SweepOptions(
        comparison=comparison,
        rates_gbit=given.rates,
        delays_ms=given.delays,
        time_limit_s=given.time_limit or _DEFAULT_TIME_LIMIT_S[given.device],
        only_plan=given.plan,
        json_path=given.json,
        details_path=given.details,
        plot_path=given.plot,
        output_folder=None if given.output_dir is None else given.output_dir.absolute(),
    )
