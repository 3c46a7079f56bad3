"""The command line of the sweep: parsing, defaults by device, and every check that needs no network."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from measure.core.catalogue import ALL_REDUCE, GROUPS
from measure.core.tool import DEFAULT_TOLERANCE, add_algorithms, add_steps, add_training, check_warmup
from measure.options import add_length, add_results, add_sharing_option, check_results, choose_device
from netlab import parse_delay_ms, parse_rate_mbit

from bagua.net.bench.argument_types import within

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
  make sweep SWEEP_ARGS="--plan"                                     what would be measured
  make sweep SWEEP_ARGS="--device cuda --rates 10G,25G,100G"         a GPU for each rank, NCCL through Bagua-Net
  make sweep SWEEP_ARGS="--device cuda --share-gpus --ranks 4"       four ranks on the GPUs that there are

Ctrl-C or SIGTERM ends it early, with the tables of what was measured.

exit status: 0, or 1 if an algorithm failed or broke what it promises, nothing was measured or it was ended early, or 2
if an option was wrong.
"""


def _several(parse: Callable[[str], float], factor: float) -> Callable[[str], tuple[float, ...]]:
    def convert(text: str) -> tuple[float, ...]:
        try:
            return tuple(dict.fromkeys(parse(part) * factor for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does. `gpus` counts them.

    What is trained in each network are options of `measure core`, with a time limit of their own for each."""
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
    parser.add_argument(
        "--rates",
        type=_several(parse_rate_mbit, 1 / _MBIT_PER_GBIT),
        default=DEFAULT_RATES,
        metavar="LIST",
        help=f"of every link (default {DEFAULT_RATES})",
    )
    parser.add_argument(
        "--delays",
        type=_several(parse_delay_ms, 1.0),
        default=DEFAULT_DELAYS,
        metavar="LIST",
        help=f"of every packet, one way (default {DEFAULT_DELAYS})",
    )
    add_algorithms(
        parser, GROUPS["algorithms"], f"must have {ALL_REDUCE}, which is gradient all-reduce (default algorithms)"
    )
    by_device = ("; with CUDA ").join(",".join(models) for models in _DEFAULT_MODELS.values())
    add_training(parser, None, by_device)
    length = add_length(parser, rounds=3)
    add_steps(length, steps=4, warmup=3)
    length.add_argument(
        "--time-limit",
        type=within(float, 10.0, 86400.0),
        metavar="S",
        help="for all networks together, which share it equally; one round of each is run in any case (default"
        f" {_DEFAULT_TIME_LIMIT_S['cpu']:g}, with CUDA {_DEFAULT_TIME_LIMIT_S['cuda']:g})",
    )
    length.add_argument("--plan", action="store_true", help="say what would be measured, and end")
    output = add_results(parser)
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep the ranks' NCCL logs there")
    given = parser.parse_args(words)
    choose_device(parser, given, gpus, ranks_option="--ranks")
    if ALL_REDUCE not in given.algorithms:
        parser.error(f"--algorithms lacks {ALL_REDUCE}, which all others are compared with; add it")
    check_warmup(parser, given)
    if not given.plan:
        check_results(parser, given, "--output-dir")
    given.model = given.model or _DEFAULT_MODELS[given.device]
    given.time_limit = given.time_limit or _DEFAULT_TIME_LIMIT_S[given.device]
    given.network = "tcp" if given.device == "cuda" else None
    given.baseline, given.tolerance = ALL_REDUCE, DEFAULT_TOLERANCE
    given.timeout = _TURN_TIMEOUT_S
    return given
