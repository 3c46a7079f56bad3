"""The command line of bagua-net-bench: parsing, defaults, and every check that needs no run."""

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
    names_of,
    parser_of,
    series_of,
    within,
)
from bagua.net.bench.driver import BACKENDS, BASELINE, PLUGIN, RAW
from bagua.net.bench.verdict import BUILDS_ERROR_CHANCE, least_repetitions
from bagua.version import __version__

PROGRAM = "bagua-net-bench"

# A default run ends within three minutes.
DEFAULT_TIME_BUDGET_S = 160.0
DEFAULT_REPEATS = 7
QUICK_SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
QUICK_TIME_BUDGET_S = 10.0
QUICK_REPEATS = 3

MIN_FRESH_PROCESSES = least_repetitions(BUILDS_ERROR_CHANCE)
FRESH_REPEATS = 5
EXIT_SLOWER = 3

_EPILOG = """\
sizes are powers of 1024 (K, M, G), as in nccl-tests; GB/s are 10^9 bytes per second.

examples:
  bagua-net-bench                               all backends, 8 B to 256 MiB, on this machine
  bagua-net-bench --quick                       a look: five sizes, a quarter of a minute
  bagua-net-bench -b 1M -e 256M -f 4 --ranks 4  four ranks, large sizes
  bagua-net-bench --json run.json --csv run.csv
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      --no-python bagua-net-bench               across hosts; srun and mpirun work as well
  bagua-net-bench --busy-per-cpu 2              while data loading keeps the CPUs busy
  bagua-net-bench --nccl --help                 the real NCCL with and without the plugin, on GPUs

exit status: 0, or 1 if a byte was wrong or the run failed, or 2 if an option was wrong, or 3 with --fail-on-slower.
"""


class Options(RunOptions):
    time_budget_s: float
    channels: int
    backends: tuple[str, ...]
    raw_streams: tuple[int, ...] | None
    address: str | None
    baseline_library: Path | None
    fresh_processes: int | None
    fail_on_slower: bool
    driver: Path | None
    busy_per_cpu: int


def _stream_counts(text: str) -> tuple[int, ...]:
    convert = within(int, 1, 256)
    return tuple(sorted({convert(item.strip()) for item in text.split(",")}))


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of(
        PROGRAM,
        "What the Bagua network plugin does on this machine, compared with a bare ring of plain sockets and the limit"
        " of raw TCP: an all-reduce in NCCL's traffic pattern, interleaved in one run.",
        _EPILOG,
    )
    add_sizes(parser)
    repeats = f"repetitions of each backend and size (default {DEFAULT_REPEATS}); their spread is min..max"
    length = add_length(parser, "repetition", repeats)
    about = "seconds for the whole run with start-up and checks, which choose the iterations, instead of -n (default "
    about += f"{DEFAULT_TIME_BUDGET_S:g})"
    add(length, "--time-budget", within(float, 1, 86400), "S", about, dest="time_budget_s")
    length.add_argument(
        "--quick", action="store_true", help=f"five sizes, {QUICK_REPEATS} repeats, {QUICK_TIME_BUDGET_S:g} s budget"
    )

    what = parser.add_argument_group("what runs")
    about = f"of {','.join(BACKENDS)} (default all)"
    add(what, "--backends", names_of("backend", BACKENDS), "LIST", about)
    add(what, "--ranks", within(int, 2, 64), "W", "processes on this machine (default 2)")
    about = "ring connections of a rank (default 2)"
    add(what, "--channels", within(int, 1, 64), "C", about, default=2)
    add(what, "--raw-streams", _stream_counts, "LIST", "of raw TCP (default 1,2,4.. up to the number of CPUs)")
    about = "busy processes in addition to the ranks, for each CPU of a host (default 0)"
    add(what, "--busy-per-cpu", within(int, 0, 64), "N", about, default=0)
    what.add_argument("--no-verify", action="store_false", dest="verify", help="do not check the data")
    about = f"another build of libnccl-net.so, which runs as the backend {BASELINE}, compared with plugin"
    add(what, "--baseline-library", Path, "PATH", about)
    about = "with --baseline-library: N short rounds of new processes, and for each size whether the plugin is faster,"
    about += " slower or the same"
    add(what, "--fresh-processes", within(int, MIN_FRESH_PROCESSES, 1000), "N", about)
    what.add_argument(
        "--fail-on-slower", action="store_true", help="exit with 3 if that finds a size slower, or with more CPU time"
    )
    add_programs(what)
    add_network(parser, "network interface (default: lo; across hosts, rank 0's path)")
    add_results(parser)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--nccl", action="store_true", help="compare the real NCCL on GPUs; see --nccl --help")
    return parser


def parse_options(arguments: Sequence[str]) -> Options:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does."""
    parser = make_parser()
    given = parser.parse_args(arguments, Options())
    try:
        quick = given.quick and (given.minbytes, given.maxbytes, given.stepfactor) == (None, None, None)
        sizes = QUICK_SIZES if quick else tuple(series_of(given, 16 << 20 if given.quick else 256 << 20))
    except ValueError as error:
        parser.error(str(error))
    if given.iterations is not None and given.time_budget_s is not None:
        parser.error("-n/--iters is not allowed with argument --time-budget, which chooses the iterations")
    fresh = given.fresh_processes
    backends: tuple[str, ...] = given.backends or ((PLUGIN, "bare") if fresh else BACKENDS)
    if fresh and given.baseline_library is None:
        parser.error(f"--fresh-processes {fresh} compares two builds; name the other with --baseline-library")
    if fresh and (others := sorted({*backends} - {PLUGIN, "bare"})):
        parser.error(f"--fresh-processes measures plugin and bare; leave {', '.join(others)} out of --backends")
    if given.fail_on_slower and not fresh:
        parser.error("--fail-on-slower needs the verdicts of --fresh-processes; give both")
    if given.raw_streams and RAW not in backends:
        parser.error(f"--raw-streams {given.raw_streams} without the backend raw; add raw to --backends")
    if given.baseline_library is not None:
        if PLUGIN not in backends:
            parser.error(
                f"--baseline-library {given.baseline_library} without the backend plugin, which it is compared with;"
                " add plugin to --backends"
            )
        after = backends.index(PLUGIN) + 1
        backends = (*backends[:after], BASELINE, *backends[after:])
    repeats, time_budget_s = DEFAULT_REPEATS, DEFAULT_TIME_BUDGET_S
    if given.quick:
        repeats, time_budget_s = QUICK_REPEATS, QUICK_TIME_BUDGET_S
    given.sizes, given.backends = sizes, backends
    given.repeats = given.repeats or (FRESH_REPEATS if fresh else repeats)
    given.time_budget_s = given.time_budget_s or time_budget_s
    return given
