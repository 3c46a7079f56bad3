"""The command line of bagua-net-bench --peers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.argument_types import byte_size, names_of, within
from bagua.net.bench.command import OptionParser
from bagua.net.bench.sizes import format_size

PROGRAM = "bagua-net-bench --peers"

DEFAULT_COMMS = (1, 8, 64)
MAX_COMMS = 1024
MAX_IN_FLIGHT = 32
MAX_MESSAGE_BYTES = 1 << 30
PEERS_BACKENDS = ("plugin", "bare")

_EPILOG = """\
sizes are powers of 1024 (K, M, G); GB/s are 10^9 bytes per second, each way.

examples:
  bagua-net-bench --peers                       1, 8 and 64 comms each way
  bagua-net-bench --peers 1,16,256 --in-flight 32
  BAGUA_NET_NWORKERS=2 bagua-net-bench --peers  with two I/O threads, whatever the machine is

exit status: 0, or 1 if a byte was wrong or the run failed, or 2 if an option was wrong.
"""


@dataclass(frozen=True)
class PeersOptions:
    comms: tuple[int, ...]
    message_sizes: tuple[int, ...]
    in_flight: int
    messages: int | None  # of a visit; None: as many as the time budget allows
    repeats: int
    time_budget_s: float
    silence_s: float
    idle_s: float
    backends: tuple[str, ...]
    library: Path | None
    driver: Path | None
    address: str | None
    interface: str | None
    timeout_s: float
    json_path: Path | None
    csv_path: Path | None


def _comms(text: str) -> tuple[int, ...]:
    convert = within(int, 1, MAX_COMMS)
    return tuple(sorted({convert(item.strip()) for item in text.split(",")}))


def _message_sizes(text: str) -> tuple[int, ...]:
    sizes = [byte_size(item) for item in text.split(",")]
    for size in sizes:
        if not 1 <= size <= MAX_MESSAGE_BYTES:
            raise argparse.ArgumentTypeError(
                f"a message of {format_size(size)} is outside 1 B..{format_size(MAX_MESSAGE_BYTES)}; give sizes in"
                " that range"
            )
    return tuple(dict.fromkeys(sizes))


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog=PROGRAM,
        usage="%(prog)s [N[,N...]] [option ...]",
        description="What many connections cost: two processes on this machine with N comms each way between them,"
        " messages that take the comms in turn, and then silence. The same number of messages is under way however"
        " many comms there are.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        type=_comms,
        const=DEFAULT_COMMS,
        required=True,
        metavar="N[,N...]",
        help=f"comms each way (default {','.join(map(str, DEFAULT_COMMS))})",
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--message-sizes",
        type=_message_sizes,
        default=(1 << 20, 64 << 10),
        metavar="LIST",
        help="bytes of a message (default 1M,64K)",
    )
    traffic.add_argument(
        "--in-flight",
        type=within(int, 1, MAX_IN_FLIGHT),
        default=8,
        metavar="N",
        help="messages under way each way, over all comms together (default 8)",
    )
    length = parser.add_argument_group("how long")
    how_many = length.add_mutually_exclusive_group()
    how_many.add_argument(
        "--messages", type=within(int, 1, 10_000_000), metavar="N", help="of a repetition (default: by time budget)"
    )
    how_many.add_argument(
        "--time-budget",
        type=within(float, 1, 86400),
        default=30.0,
        metavar="S",
        help="seconds of traffic in all, which choose the messages of a repetition (default 30)",
    )
    length.add_argument(
        "--repeats", type=within(int, 1, 1000), default=7, metavar="N", help="repetitions of each figure (default 7)"
    )
    length.add_argument(
        "--silence",
        type=within(float, 0, 3600),
        default=2.0,
        metavar="S",
        help="between the last message and the look at the idle processes (default 2)",
    )
    length.add_argument(
        "--idle", type=within(float, 0.1, 3600), default=3.0, metavar="S", help="seconds of that look (default 3)"
    )
    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--backends",
        type=names_of("backend", PEERS_BACKENDS),
        default=PEERS_BACKENDS,
        metavar="LIST",
        help=f"of {','.join(PEERS_BACKENDS)} (default both)",
    )
    what.add_argument("--library", type=Path, metavar="PATH", help="libnccl-net.so (default: the package's)")
    what.add_argument("--driver", type=Path, metavar="PATH", help="bagua-net-driver (default: the package's)")
    what.add_argument("--interface", metavar="NAME", help="network interface (default lo)")
    what.add_argument("--address", metavar="IP", help="an address of this host instead of an interface")
    what.add_argument(
        "--timeout",
        type=within(float, 1, 3600),
        default=60.0,
        metavar="S",
        help="for anything that makes no progress (default 60)",
    )
    output = parser.add_argument_group("results")
    output.add_argument("--json", type=Path, metavar="PATH", help="every figure and the machine's facts")
    output.add_argument("--csv", type=Path, metavar="PATH", help="one row a backend, number of comms and size")
    return parser


def parse_peers_options(arguments: Sequence[str]) -> PeersOptions:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does."""
    given = make_parser().parse_args(arguments)
    return PeersOptions(
        comms=given.peers,
        message_sizes=given.message_sizes,
        in_flight=given.in_flight,
        messages=given.messages,
        repeats=given.repeats,
        time_budget_s=given.time_budget,
        silence_s=given.silence,
        idle_s=given.idle,
        backends=given.backends,
        library=given.library,
        driver=given.driver,
        address=given.address,
        interface=given.interface,
        timeout_s=given.timeout,
        json_path=given.json,
        csv_path=given.csv,
    )
