"""The command line of bagua-net-bench --peers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.net.bench.argument_types import byte_size, names_of, within
from bagua.net.bench.shared_options import add_network, add_programs, add_results, options_of, parser_of
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
    parser = parser_of(
        PROGRAM,
        "What many connections cost: two processes on this machine with N comms each way between them, messages that"
        " take the comms in turn, and then silence. The same number of messages is under way however many comms there"
        " are.",
        _EPILOG,
        usage="%(prog)s [N[,N...]] [option ...]",
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        type=_comms,
        const=DEFAULT_COMMS,
        dest="comms",
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
        dest="time_budget_s",
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
        dest="silence_s",
        help="between the last message and the look at the idle processes (default 2)",
    )
    length.add_argument(
        "--idle",
        type=within(float, 0.1, 3600),
        default=3.0,
        metavar="S",
        dest="idle_s",
        help="seconds of that look (default 3)",
    )
    what = parser.add_argument_group("what runs")
    what.add_argument(
        "--backends",
        type=names_of("backend", PEERS_BACKENDS),
        default=PEERS_BACKENDS,
        metavar="LIST",
        help=f"of {','.join(PEERS_BACKENDS)} (default both)",
    )
    add_programs(what)
    add_network(parser, "network interface (default lo)", launched=False)
    add_results(parser, plot=None)
    return parser


def parse_peers_options(arguments: Sequence[str]) -> PeersOptions:
    """Exits with code 2 and a message that names value, limit and remedy, as argparse does."""
    return options_of(PeersOptions, make_parser().parse_args(arguments))
