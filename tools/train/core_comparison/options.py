"""The command line of compare_core.py: parsing, defaults by device and model, and every check that needs no rank."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_option import add_sharing_option, chosen_device

from bagua.net.bench.argument_types import names_of, within
from bagua.net.bench.export import check_output_files, make_folder
from bagua.net.bench.gpu_sharing import GpuSharing
from core_comparison.catalogue import (
    ALGORITHMS,
    DEFAULT_ALGORITHMS,
    DEFAULT_MODELS,
    DEFAULT_MODELS_ON_CPU,
    DTYPES,
    FLOAT32,
    GROUPS,
    MODELS,
    REFERENCE,
)

# An algorithm's sums may be of another order than DDP's, and training carries the last bit's difference on. A gradient
# that was not averaged is ten times beyond this.
DEFAULT_TOLERANCE = 0.1
TRACED_STEPS = 3

_EPILOG = """\
models:
{models}

algorithms:
{algorithms}
  or several by one name: {groups}

One process group for all; in every round each algorithm trains a fresh copy of the model from the same start, in an
order that rotates, and frees it. A step's time is that of its slowest rank.

examples:
  python tools/train/compare_core.py --nproc-per-node 2                          CPUs: mlp and convnet
  python tools/train/compare_core.py --nproc-per-node 4 --trace traces --json core.json
  python tools/train/compare_core.py --nproc-per-node 2 --network tcp --model vgg16,gpt2
  python tools/train/compare_core.py --nproc-per-node 4 --network tcp --share-gpus       four ranks on one GPU, say
  python tools/train/compare_core.py --nproc-per-node 2 --algorithms algorithms --baseline with-bagua --model wide

exit status: 0, or 1 if an algorithm failed or broke what it promises (the same parameters on all ranks, or those of
torch's DDP) or NCCL's log shows another network, or 2 if an option was wrong.
"""


@dataclass(frozen=True)
class Options:
    ranks: int
    device: str  # "cuda" or "cpu"
    models: tuple[str, ...]
    algorithms: tuple[str, ...]
    baseline: str
    steps: int
    warmup: int
    rounds: int
    batch_size: int | None  # None: the model's
    dtype: str | None
    length: int | None
    network: str | None  # None on a CPU
    seed: int
    deterministic: bool
    tolerance: float
    timeout_s: float
    time_limit_s: float
    json_path: Path | None
    details_path: Path | None
    trace_folder: Path | None
    output_folder: Path | None
    sharing: GpuSharing | None = None

    def batch_size_of(self, model: str) -> int:
        entry = MODELS[model]
        return self.batch_size or (entry.batch_size if self.device == "cuda" else entry.batch_size_on_cpu)

    def turn(self, model: str) -> dict[str, object]:
        """The command's part that says how large the model is."""
        entry = MODELS[model]
        on_gpu = self.device == "cuda"
        return {
            "model": model,
            "length": self.length or (entry.length if on_gpu else entry.length_on_cpu),
            "batch_size": self.batch_size_of(model),
            "dtype": self.dtype or (entry.dtype if on_gpu else FLOAT32),
        }


def _epilog() -> str:
    models = [f"  {name:<10} {entry.about}" for name, entry in MODELS.items()]
    algorithms = [f"  {name:<28} {entry.about}" for name, entry in ALGORITHMS.items()]
    return _EPILOG.format(models="\n".join(models), algorithms="\n".join(algorithms), groups=", ".join(GROUPS))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_core.py",
        description="Compares Bagua's algorithms with torch's DistributedDataParallel: step time, memory, models.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc-per-node", type=within(int, 1, 128), default=2, metavar="N", help="ranks, one per GPU (default 2)"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: CUDA if any")
    add_sharing_option(parser)
    parser.add_argument(
        "--model",
        type=names_of("model", list(MODELS)),
        metavar="LIST",
        help=f"of {', '.join(MODELS)} (default {','.join(DEFAULT_MODELS)}; on CPUs {','.join(DEFAULT_MODELS_ON_CPU)})",
    )
    parser.add_argument(
        "--algorithms",
        "--backends",  # its former name
        type=names_of("algorithm", list(ALGORITHMS), GROUPS),
        default=DEFAULT_ALGORITHMS,
        metavar="LIST",
        help=f"default {','.join(DEFAULT_ALGORITHMS)}",
    )
    parser.add_argument(
        "--baseline",
        choices=list(ALGORITHMS),
        default=REFERENCE,
        metavar="NAME",
        help=f"the algorithm that speed-ups are over (default {REFERENCE}); with-bagua is gradient all-reduce",
    )
    length = parser.add_argument_group("how long")
    length.add_argument("--steps", type=within(int, 1, 100_000), default=20, help="timed steps of a turn (default 20)")
    length.add_argument("--warmup", type=within(int, 0, 10_000), default=5, help="steps before them (default 5)")
    length.add_argument(
        "--rounds", type=within(int, 1, 1000), default=5, help="turns of each algorithm with each model (default 5)"
    )
    length.add_argument(
        "--time-limit",
        type=within(float, 1.0, 86400.0),
        default=420.0,
        metavar="S",
        help="seconds for the whole run; no round begins that is longer than what is left (default 420)",
    )
    length.add_argument(
        "--timeout", type=within(float, 1.0, 3600.0), default=120.0, metavar="S", help="for one turn (default 120)"
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument("--batch-size", type=within(int, 1, 65536), metavar="N", help="per rank (default: the model's)")
    what.add_argument("--dtype", choices=DTYPES, help="bf16: autocast (default: the model's; float32 on CPUs)")
    what.add_argument(
        "--length", type=within(int, 1, 65536), metavar="N", help="pixels, tokens or layers (default: the model's)"
    )
    what.add_argument("--seed", type=int, default=1, help="of weights and batches (default 1)")
    what.add_argument("--deterministic", action="store_true", help="deterministic kernels where there are such")
    what.add_argument(
        "--tolerance",
        type=within(float, 0.0, 10.0),
        default=DEFAULT_TOLERANCE,
        metavar="X",
        help="how far final parameters may be from DDP's, as a part of the way from the start; never less than thrice"
        f" what rounds of DDP differ by (default {DEFAULT_TOLERANCE:g})",
    )
    network = parser.add_argument_group("network (CUDA)")
    network.add_argument(
        "--network",
        choices=("nvlink", "tcp"),
        help="nvlink: what NCCL takes on this host; tcp: P2P and shared memory off, loopback through Bagua-Net"
        " (default nvlink)",
    )
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="PATH", help="result file: medians and their range")
    output.add_argument("--details", type=Path, metavar="PATH", help="every step of every turn, as JSON")
    output.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help=f"Chrome traces of {TRACED_STEPS} steps of each algorithm, of rank 0, there",
    )
    output.add_argument("--output-dir", type=Path, metavar="DIR", help="keep NCCL's logs there")
    return parser


def parse_options(words: Sequence[str] | None = None, *, gpus: Callable[[], int] | None = None) -> Options:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does. `gpus` counts them."""
    parser = make_parser()
    given = parser.parse_args(words)
    device = chosen_device(parser, given, gpus, auto_is_cuda_with_any=True)
    if device.type == "cpu" and given.network is not None:
        parser.error(f"--network {given.network} is a choice of NCCL's; gloo on CPUs has loopback TCP: leave it out")
    if device.sharing is not None and given.network != "tcp":
        parser.error(
            f"--share-gpus: ranks of one GPU reach each other over TCP only; add --network tcp, or give as many"
            f" ranks as there are GPUs, {device.sharing.gpus}"
        )
    if given.baseline not in given.algorithms:
        if len(given.algorithms) < 2:
            parser.error(f"--algorithms {given.algorithms[0]} has nothing to be compared with; add {given.baseline}")
        if given.baseline != REFERENCE:
            parser.error(f"--baseline {given.baseline} is none of --algorithms; add it there")
    if problem := warmup_problem(given.algorithms, given.warmup):
        parser.error(problem)
    try:
        check_output_files([("--json", given.json), ("--details", given.details)])
        for option, folder in (("--trace", given.trace), ("--output-dir", given.output_dir)):
            if folder is not None:
                make_folder(option, folder)
    except ValueError as error:
        parser.error(str(error))
    return Options(
        ranks=given.nproc_per_node,
        device=device.type,
        models=given.model or (DEFAULT_MODELS if device.type == "cuda" else DEFAULT_MODELS_ON_CPU),
        algorithms=given.algorithms,
        baseline=given.baseline,
        steps=given.steps,
        warmup=given.warmup,
        rounds=given.rounds,
        batch_size=given.batch_size,
        dtype=given.dtype,
        length=given.length,
        network=(given.network or "nvlink") if device.type == "cuda" else None,
        seed=given.seed,
        deterministic=given.deterministic,
        tolerance=given.tolerance,
        timeout_s=given.timeout,
        time_limit_s=given.time_limit,
        json_path=given.json,
        details_path=given.details,
        trace_folder=None if given.trace is None else given.trace.absolute(),
        output_folder=None if given.output_dir is None else given.output_dir.absolute(),
        sharing=device.sharing,
    )


def warmup_problem(algorithms: Sequence[str], warmup: int) -> str | None:
    """The first algorithm that would not be what it is called in the measured steps."""
    for name in algorithms:
        least = ALGORITHMS[name].least_warmup
        if warmup < least:
            return f"--warmup {warmup}: {name} compresses only after some steps; give {least} or more, or leave it out"
    return None
