"""The command line of `bagua-net-bench --nccl`: parsing, defaults, and every check that needs no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bagua.net.bench.command_line import (
    RunOptions,
    add,
    add_length,
    add_network,
    add_programs,
    add_results,
    add_sizes,
    byte_size,
    check_outputs,
    make_folder,
    names_of,
    parser_of,
    series_of,
    within,
)
from bagua.net.bench.driver import check_library
from bagua.net.bench.errors import BenchError, UsageError
from bagua.net.bench.nccl_ab.backend import BEST, BEST_TUNED, DEFAULT_TUNED, Backend, make_backends, tuned_settings
from bagua.net.bench.nccl_ab.session import ELEMENT_BYTES, GPU_COLLECTIVES
from bagua.net.library import MissingFileError, library_path

PROGRAM = "bagua-net-bench --nccl"

DEFAULT_REPEATS = 5
DEFAULT_TURN_S = 0.15
DEFAULT_TIME_LIMIT_S = 480.0

_EPILOG = """\
Each backend is a group of processes of its own, one per GPU, because NCCL reads its environment once; all groups
live for the whole run and take turns. NCCL's log has to show for every rank that the backend used the network it is
named after; otherwise that is an error.

examples:
  bagua-net-bench --nccl                                      all GPUs of this host over loopback TCP
  bagua-net-bench --nccl --share-gpus --ranks 2               a machine with a single GPU
  bagua-net-bench --nccl --collectives all_reduce,send_recv -b 1K -e 64M -f 4
  bagua-net-bench --nccl --tuned best --shared-memory         compared with the best of nine NCCL settings, by size
  bagua-net-bench --nccl --tuned 4x4x16 --variant one:BAGUA_NET_NSTREAMS=1 --shared-memory
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      --no-python bagua-net-bench --nccl                      across hosts; srun and mpirun work as well

exit status: 0, or 1 if a backend failed, used another network or gave wrong data, or 2 if an option was wrong.
"""


class NcclOptions(RunOptions):
    collectives: tuple[str, ...]
    dtype: str
    backends: tuple[Backend, ...]
    share_gpus: bool
    tcp_only: bool | None  # None: when all ranks are on one host
    turn_seconds: float
    time_limit_s: float
    all_columns: bool
    output_dir: Path | None
    backend: str
    device: str


def _sizes(text: str) -> tuple[int, ...]:
    sizes = [byte_size(part) for part in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"size 0 in {text!r} is below the limit of 1 B; leave it out")
    return tuple(sorted(set(sizes)))


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        PROGRAM,
        "The real NCCL on this machine's GPUs: its own transport with default settings, hand-tuned, and the Bagua"
        " network plugin with nothing but defaults, interleaved in one run with every result checked.",
        _EPILOG,
    )
    sizes = add_sizes(parser)
    add(sizes, "--sizes", _sizes, "LIST", "these sizes, with commas, instead of -b, -e and -f")
    sizes.add_argument(
        "-d", "--datatype", choices=sorted(ELEMENT_BYTES), default="bfloat16", dest="dtype", help="default bfloat16"
    )

    what = parser.add_argument_group("what runs")
    collectives = names_of("collective", GPU_COLLECTIVES, {"all": GPU_COLLECTIVES})
    about = f"with commas, of {', '.join(GPU_COLLECTIVES)}, or all (default all_reduce)"
    add(what, "--collectives", collectives, "LIST", about, default=("all_reduce",))
    about = (
        "NCCL's own transport with T threads, S sockets each and at least C channels; may be repeated, or a list"
        f" with commas; {BEST} stands for {','.join(BEST_TUNED)}, of which the report shows the best of each size; none"
        f" for no such backend (default {DEFAULT_TUNED})"
    )
    add(what, "--tuned", str, "TxS[xC]", about, action="append")
    about = "the plugin with settings on top of its defaults; may be repeated"
    add(what, "--variant", str, "NAME:VAR=VALUE,...", about, action="append", default=[])
    what.add_argument(
        "--shared-memory", action="store_true", help="add NCCL over shared memory (no TCP) as a yardstick"
    )
    what.add_argument("--without-plugin", action="store_true", help="NCCL's own settings only")
    add_programs(what, driver=False)
    add(what, "--ranks", within(int, 2, 128), "W", "GPUs of this machine to use (default all)")
    what.add_argument(
        "--share-gpus",
        action="store_true",
        help="several ranks on a GPU where --ranks is more than this machine has (default 2 ranks on one GPU)",
    )
    what.add_argument("--no-verify", action="store_false", dest="verify", help="do not check the data")

    length = add_length(parser, "turn", f"turns of each backend at each size (default {DEFAULT_REPEATS})")
    parser.set_defaults(repeats=DEFAULT_REPEATS)
    about = (
        f"duration of the slowest backend's turn (default {DEFAULT_TURN_S:g}); less where the time limit asks for it"
    )
    add(length, "--turn-seconds", within(float, 0.001, 60.0), "S", about, default=DEFAULT_TURN_S)
    about = (
        "time limit of the run, in seconds, once all backends have started; after it no further turn begins,"
        f" and what was measured is reported (default {DEFAULT_TIME_LIMIT_S:g})"
    )
    limit = within(float, 1.0, 86400.0)
    add(length, "--time-limit", limit, "S", about, default=DEFAULT_TIME_LIMIT_S, dest="time_limit_s")

    network = add_network(parser, "NCCL_SOCKET_IFNAME of all backends", address=False)
    network.add_argument(
        "--tcp-only",
        action=argparse.BooleanOptionalAction,
        help="switch NCCL's P2P and shared memory off, over the loopback interface unless NCCL_SOCKET_IFNAME says"
        " another (default: when all ranks are on one host, where TCP would never be used otherwise)",
    )

    output = add_results(parser)
    output.add_argument(
        "--all-columns", action="store_true", help="a column for each backend, even with more than four"
    )
    add(output, "--output-dir", Path, "DIR", "both there (nccl.json and nccl.csv), and NCCL's logs")
    # gloo on CPUs drives everything but NCCL itself, so that the whole orchestration is tested without GPUs.
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser


def parse_options(arguments: Sequence[str]) -> NcclOptions:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does."""
    parser = make_parser()
    given = parser.parse_args(arguments, NcclOptions())
    if (given.backend == "gloo") != (given.device == "cpu"):
        parser.error("--backend gloo and --device cpu belong together")
    try:
        sizes = given.sizes or tuple(series_of(given))
        backends = make_backends(
            library=None if given.without_plugin else _library(given.library),
            tuned=tuned_settings(given.tuned),
            variants=given.variant,
            with_shared_memory=given.shared_memory,
        )
    except ValueError as error:
        parser.error(str(error))
    if len(backends) < 2:
        parser.error("--without-plugin with --tuned none leaves one backend; a comparison needs two")
    given.sizes, given.backends = sizes, tuple(backends)
    given.json_path = _result_path(given.json_path, given.output_dir, "nccl.json")
    given.csv_path = _result_path(given.csv_path, given.output_dir, "nccl.csv")
    return given


def _library(given: Path | None) -> Path:
    try:
        library = given or library_path()
    except MissingFileError as error:
        raise BenchError(f"{error}; or name a built one with --library") from error
    check_library(library)
    return library.absolute()


def _result_path(given: Path | None, folder: Path | None, name: str) -> Path | None:
    return given if given is not None or folder is None else folder / name


def check_files(options: NcclOptions) -> None:
    """Makes the folder. Raises UsageError."""
    try:
        if options.output_dir is not None:
            make_folder("--output-dir", options.output_dir)
    except ValueError as error:
        raise UsageError(str(error)) from error
    check_outputs(options.json_path, options.csv_path)
