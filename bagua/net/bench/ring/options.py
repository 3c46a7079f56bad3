"""The command line of bagua-net-bench: parsing, defaults, and every check that needs no run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.argument_types import byte_size, names_of, within
from bagua.net.bench.command import OptionParser
from bagua.net.bench.settings import BACKENDS, BASELINE, RAW
from bagua.net.bench.sizes import size_series
from bagua.version import __version__

PROGRAM = "bagua-net-bench"

# A default run ends within three minutes: drawing a plot takes what is left.
DEFAULT_TIME_BUDGET_S = 160.0
DEFAULT_REPEATS = 7
DEFAULT_TIMEOUT_S = 60.0
QUICK_SIZES = (8, 1 << 10, 64 << 10, 1 << 20, 16 << 20)
QUICK_TIME_BUDGET_S = 10.0
QUICK_REPEATS = 3

MAX_RANKS = 64
MAX_CHANNELS = 64
MAX_STREAMS = 256
MAX_BUSY_PER_CPU = 64

_EPILOG = """\
sizes are powers of 1024 (K, M, G), as in nccl-tests; GB/s are 10^9 bytes per second.

examples:
  bagua-net-bench                               all backends, 8 B to 256 MiB, on this machine
  bagua-net-bench --quick                       a look: five sizes, a quarter of a minute
  bagua-net-bench -b 1M -e 256M -f 4 --ranks 4  four ranks, large sizes
  bagua-net-bench --json run.json --plot run.pdf
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
      --no-python bagua-net-bench               across hosts; srun and mpirun work as well
  bagua-net-bench --busy-per-cpu 2              while data loading keeps the CPUs busy
  bagua-net-bench --peers                       1, 8 and 64 connections each way, and what they cost when idle
  bagua-net-bench --nccl --help                 the real NCCL with and without the plugin, on GPUs

exit status: 0, or 1 if a byte was wrong or the run failed, or 2 if an option was wrong.
"""


@dataclass(frozen=True)
class Options:
    sizes: tuple[int, ...]
    iterations: int | None  # None: as many as the time budget allows
    warmup: int | None
    repeats: int
    time_budget_s: float
    ranks: int | None  # None: 2, or as many as the launcher started
    channels: int
    backends: tuple[str, ...]
    raw_streams: tuple[int, ...] | None
    verify: bool
    json_path: Path | None
    csv_path: Path | None
    plot_path: Path | None
    address: str | None
    interface: str | None
    library: Path | None
    baseline_library: Path | None
    driver: Path | None
    timeout_s: float
    port: int | None
    local: bool
    busy_per_cpu: int


def _stream_counts(text: str) -> tuple[int, ...]:
    convert = within(int, 1, MAX_STREAMS)
    return tuple(sorted({convert(item.strip()) for item in text.split(",")}))


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog=PROGRAM,
        description="What the Bagua network plugin does on this machine, compared with a bare ring of plain sockets"
        " and the limit of raw TCP: an all-reduce in NCCL's traffic pattern, interleaved in one run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = parser.add_argument_group("sizes (nccl-tests spellings)")
    sizes.add_argument("-b", "--minbytes", type=byte_size, metavar="SIZE", help="smallest size (default 8)")
    sizes.add_argument("-e", "--maxbytes", type=byte_size, metavar="SIZE", help="largest size (default 256M)")
    sizes.add_argument(
        "-f", "--stepfactor", type=within(int, 2, 1024), metavar="N", help="from size to size (default 2)"
    )

    length = parser.add_argument_group("how long")
    how_many = length.add_mutually_exclusive_group()
    how_many.add_argument(
        "-n",
        "--iters",
        type=within(int, 1, 100_000),
        metavar="N",
        help="iterations of a repetition (default: by time budget)",
    )
    how_many.add_argument(
        "--time-budget",
        type=within(float, 1, 86400),
        metavar="S",
        help="seconds for the whole run with start-up and checks, which choose the iterations"
        f" (default {DEFAULT_TIME_BUDGET_S:g})",
    )
    length.add_argument(
        "-w",
        "--warmup_iters",
        type=within(int, 0, 10_000),
        metavar="N",
        help="warm-ups of a repetition (default: a sixth of the iterations)",
    )
    length.add_argument(
        "--repeats",
        type=within(int, 1, 1000),
        metavar="N",
        help=f"repetitions of each backend and size (default {DEFAULT_REPEATS}); their spread is min..max",
    )
    length.add_argument(
        "--quick", action="store_true", help=f"five sizes, {QUICK_REPEATS} repeats, {QUICK_TIME_BUDGET_S:g} s budget"
    )

    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--backends",
        type=names_of("backend", BACKENDS),
        metavar="LIST",
        help=f"of {','.join(BACKENDS)} (default all)",
    )
    what.add_argument(
        "--ranks", type=within(int, 2, MAX_RANKS), metavar="W", help="processes on this machine (default 2)"
    )
    what.add_argument(
        "--channels",
        type=within(int, 1, MAX_CHANNELS),
        default=2,
        metavar="C",
        help="ring connections of a rank (default 2)",
    )
    what.add_argument(
        "--raw-streams",
        type=_stream_counts,
        metavar="LIST",
        help="of raw TCP (default 1,2,4.. up to the number of CPUs)",
    )
    what.add_argument(
        "--busy-per-cpu",
        type=within(int, 0, MAX_BUSY_PER_CPU),
        default=0,
        metavar="N",
        help="busy processes in addition to the ranks, for each CPU of a host (default 0)",
    )
    what.add_argument("--no-verify", action="store_true", help="do not check the data")
    what.add_argument("--library", type=Path, metavar="PATH", help="libnccl-net.so (default: the package's)")
    what.add_argument(
        "--baseline-library",
        type=Path,
        metavar="PATH",
        help=f"another build of libnccl-net.so, which runs as the backend {BASELINE}, compared with plugin",
    )
    what.add_argument("--driver", type=Path, metavar="PATH", help="bagua-net-driver (default: the package's)")

    network = parser.add_argument_group("network")
    network.add_argument(
        "--interface", metavar="NAME", help="network interface (default: lo; across hosts, rank 0's path)"
    )
    network.add_argument("--address", metavar="IP", help="an address of this host instead of an interface")
    network.add_argument(
        "--port", type=within(int, 1, 65535), metavar="N", help="where launched ranks meet on rank 0's host"
    )
    network.add_argument(
        "--timeout",
        type=within(float, 1, 3600),
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help=f"for anything that makes no progress (default {DEFAULT_TIMEOUT_S:g})",
    )
    network.add_argument("--local", action="store_true", help="run here alone even if a launcher's variables are set")

    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="PATH", help="every figure and the machine's facts")
    output.add_argument("--csv", type=Path, metavar="PATH", help="one row a backend and size")
    output.add_argument("--plot", type=Path, metavar="PATH", help="a .png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument("--nccl", action="store_true", help="compare the real NCCL on GPUs; see --nccl --help")
    parser.add_argument("--peers", action="store_true", help="what many connections cost; see --peers --help")
    return parser


def parse_options(arguments: Sequence[str]) -> Options:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        sizes = _sizes(given)
    except ValueError as error:
        parser.error(str(error))
    repeats = QUICK_REPEATS if given.quick else DEFAULT_REPEATS
    budget = QUICK_TIME_BUDGET_S if given.quick else DEFAULT_TIME_BUDGET_S
    backends: tuple[str, ...] = given.backends or BACKENDS
    if given.raw_streams and RAW not in backends:
        parser.error(f"--raw-streams {given.raw_streams} without the backend raw; add raw to --backends")
    if given.baseline_library is not None:
        if "plugin" not in backends:
            parser.error(
                f"--baseline-library {given.baseline_library} without the backend plugin, which it is compared with;"
                " add plugin to --backends"
            )
        after = backends.index("plugin") + 1
        backends = (*backends[:after], BASELINE, *backends[after:])
    return Options(
        sizes=tuple(sizes),
        iterations=given.iters,
        warmup=given.warmup_iters,
        repeats=given.repeats or repeats,
        time_budget_s=given.time_budget or budget,
        ranks=given.ranks,
        channels=given.channels,
        backends=backends,
        raw_streams=given.raw_streams,
        verify=not given.no_verify,
        json_path=given.json,
        csv_path=given.csv,
        plot_path=given.plot,
        address=given.address,
        interface=given.interface,
        library=given.library,
        baseline_library=given.baseline_library,
        driver=given.driver,
        timeout_s=given.timeout,
        port=given.port,
        local=given.local,
        busy_per_cpu=given.busy_per_cpu,
    )


def _sizes(given: argparse.Namespace) -> list[int]:
    if given.quick and given.minbytes is None and given.maxbytes is None and given.stepfactor is None:
        return list(QUICK_SIZES)
    begin = 8 if given.minbytes is None else given.minbytes
    end = (16 << 20 if given.quick else 256 << 20) if given.maxbytes is None else given.maxbytes
    if given.minbytes is not None and given.maxbytes is None:
        end = max(begin, end)
    return size_series(begin, end, 2 if given.stepfactor is None else given.stepfactor)
