"""`measure core`: train with torch's DDP and with Bagua's algorithms in turns, and compare step time, memory and final
models."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from netlab import NetlabError

from bagua.net.bench.api import BenchError, Progress, ignored_variables, names_of, shows_colour, within
from measure.core.catalogue import (
    ALGORITHMS,
    DEFAULT_ALGORITHMS,
    DEFAULT_MODELS,
    DEFAULT_MODELS_ON_CPU,
    DTYPES,
    GROUPS,
    MODELS,
    REFERENCE,
)
from measure.core.ranks import start_ranks
from measure.core.report import report_of
from measure.core.run import CoreRun
from measure.options import add_length, add_ranks, add_results, check_results, choose_device, parser_of
from measure.ranks.network import Network, add_networks

# An algorithm's sums may be of another order than DDP's, and training carries the last bit's difference on. A gradient
# that was not averaged is ten times beyond this.
DEFAULT_TOLERANCE = 0.1

_EPILOG = """\
models:
{models}

algorithms:
{algorithms}
  or several by one name: {groups}

One process group for all; in every round each algorithm trains a fresh copy of the model from the same start, in an
order that rotates, and frees it. A step's time is that of its slowest rank.

examples:
  measure core --nproc-per-node 2                          CPUs: mlp and convnet
  measure core --nproc-per-node 4 --json core.json
  measure core --nproc-per-node 2 --network tcp --model vgg16,gpt2
  measure core --nproc-per-node 4 --network tcp --share-gpus       four ranks on one GPU, say
  measure core --nproc-per-node 2 --algorithms algorithms --baseline with-bagua --model wide
  measure core --networks 1G,10G+5ms --algorithms algorithms --baseline with-bagua     emulated networks, as root

exit status: 0, or 1 if an algorithm failed or broke what it promises (the same parameters on all ranks, or those of
torch's DDP) or NCCL's log shows another network, or 2 if an option was wrong.
"""


def add_training(parser: argparse.ArgumentParser, models: Sequence[str] | None, about_models: str) -> None:
    """What is trained: model, size, seed. `models`: by default these."""
    parser.add_argument(
        "--model",
        type=names_of("model", list(MODELS)),
        default=models,
        metavar="LIST",
        help=f"of {', '.join(MODELS)} (default {about_models})",
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--batch-size", type=within(int, 1, 65536), metavar="N", help="per rank (default: the model's)")
    what.add_argument("--dtype", choices=DTYPES, help="bf16: autocast (default: the model's; float32 on CPUs)")
    what.add_argument(
        "--length", type=within(int, 1, 65536), metavar="N", help="pixels, tokens or layers (default: the model's)"
    )
    what.add_argument("--seed", type=int, default=1, help="of weights and batches (default 1)")
    what.add_argument("--deterministic", action="store_true", help="deterministic kernels where there are such")


def add_steps(length: argparse._ArgumentGroup, *, steps: int, warmup: int) -> None:
    length.add_argument(
        "--steps", type=within(int, 1, 100_000), default=steps, help=f"timed steps of a turn (default {steps})"
    )
    length.add_argument(
        "--warmup", type=within(int, 0, 10_000), default=warmup, help=f"steps before them (default {warmup})"
    )


def add_algorithms(parser: argparse.ArgumentParser, default: Sequence[str], help_text: str) -> None:
    parser.add_argument(
        "--algorithms",
        type=names_of("algorithm", list(ALGORITHMS), GROUPS),
        default=default,
        metavar="LIST",
        help=help_text,
    )


def make_parser() -> argparse.ArgumentParser:
    models = [f"  {name:<10} {entry.about}" for name, entry in MODELS.items()]
    algorithms = [f"  {name:<28} {entry.about}" for name, entry in ALGORITHMS.items()]
    parser = parser_of(
        "core",
        "Compares Bagua's algorithms with torch's DistributedDataParallel: step time, memory, models.",
        _EPILOG.format(models="\n".join(models), algorithms="\n".join(algorithms), groups=", ".join(GROUPS)),
    )
    add_ranks(parser)
    add_networks(parser)
    add_algorithms(parser, DEFAULT_ALGORITHMS, f"default {','.join(DEFAULT_ALGORITHMS)}")
    parser.add_argument(
        "--baseline",
        choices=list(ALGORITHMS),
        default=REFERENCE,
        metavar="NAME",
        help=f"the algorithm that speed-ups are over (default {REFERENCE}); with-bagua is gradient all-reduce",
    )
    add_training(parser, None, f"{','.join(DEFAULT_MODELS)}; on CPUs {','.join(DEFAULT_MODELS_ON_CPU)}")
    add_steps(add_length(parser, rounds=5, time_limit_s=420.0, timeout_s=120.0), steps=20, warmup=5)
    parser.add_argument(
        "--tolerance",
        type=within(float, 0.0, 10.0),
        default=DEFAULT_TOLERANCE,
        metavar="X",
        help="how far final parameters may be from DDP's, as a part of the way from the start; never less than thrice"
        f" what rounds of DDP differ by (default {DEFAULT_TOLERANCE:g})",
    )
    parser.add_argument(
        "--network",
        choices=("nvlink", "tcp"),
        help="with CUDA, nvlink: what NCCL takes on this host; tcp: P2P and shared memory off, loopback through"
        " Bagua-Net (default nvlink)",
    )
    output = add_results(parser)
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
    return parser


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> argparse.Namespace:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does. `gpus` counts them."""
    parser = make_parser()
    given = parser.parse_args(words)
    choose_device(parser, given, gpus, auto_is_cuda_with_any=True)
    if given.device == "cpu" and given.network is not None:
        parser.error(f"--network {given.network} is a choice of NCCL's; gloo on CPUs has loopback TCP: leave it out")
    emulated = any(network.is_emulated for network in given.networks)
    if given.device == "cuda" and emulated:
        if given.network == "nvlink":
            parser.error("--network nvlink is of one host; emulated --networks have a host for each rank: leave it out")
        given.network = "tcp"
    if given.sharing is not None and given.network != "tcp":
        parser.error(
            f"--share-gpus: ranks of one GPU reach each other over TCP only; add --network tcp, or give as many"
            f" ranks as there are GPUs, {given.sharing.gpus}"
        )
    if given.baseline not in given.algorithms:
        if len(given.algorithms) < 2:
            parser.error(f"--algorithms {given.algorithms[0]} has nothing to be compared with; add {given.baseline}")
        if given.baseline != REFERENCE:
            parser.error(f"--baseline {given.baseline} is none of --algorithms; add it there")
    for name in given.algorithms:
        least = ALGORITHMS[name].least_warmup
        if given.warmup < least:
            parser.error(
                f"--warmup {given.warmup}: {name} compresses only after some steps; give {least} or more, or leave it"
                " out"
            )
    check_results(parser, given, "--output-dir")
    given.model = given.model or (DEFAULT_MODELS if given.device == "cuda" else DEFAULT_MODELS_ON_CPU)
    if given.device == "cuda":
        given.network = given.network or "nvlink"
    return given


def main(words: Sequence[str] | None = None) -> int:
    """Networks share the time that is left. What was measured until Ctrl-C or SIGTERM is reported."""
    given = parse_options(words)
    deadline = time.monotonic() + given.time_limit
    runs: list[tuple[Network, CoreRun]] = []
    errors: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    turns = given.rounds * len(given.model) * len(given.algorithms) * len(given.networks)
    try:
        with tempfile.TemporaryDirectory(prefix="measure-core-") as temporary, Progress(turns) as progress:
            logs = given.output_dir or Path(temporary)
            for number, network in enumerate(given.networks):
                share = max(1.0, deadline - time.monotonic()) / (len(given.networks) - number)
                options = argparse.Namespace(**{**vars(given), "time_limit": share})
                try:
                    with network.placement(given.ranks, given.device, given.sharing) as placement:
                        run = CoreRun(options, partial(start_ranks, options, logs, placement), progress)
                        runs.append((network, run))
                        run.run()
                except (BenchError, NetlabError) as error:
                    errors.append(f"{network.name}: {error}")
    except KeyboardInterrupt:
        errors.append("interrupted")
    finally:
        signal.signal(signal.SIGTERM, before)
    ignored = ignored_variables(os.environ)
    notes = [f"left out of the ranks' environment: {', '.join(ignored)}"] if ignored else []
    return report_of(runs, given, notes, errors, colour=shows_colour(sys.stdout)).publish(given)
