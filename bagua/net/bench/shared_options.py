"""Options that several kinds of run of bagua-net-bench have, each written once."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from bagua.net.bench.argument_types import byte_size, within
from bagua.net.bench.command import OptionParser
from bagua.net.bench.sizes import size_series

_Options = TypeVar("_Options")


def parser_of(program: str, description: str, epilog: str) -> OptionParser:
    return OptionParser(
        prog=program,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_sizes(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    sizes = parser.add_argument_group("sizes (nccl-tests spellings)")
    sizes.add_argument("-b", "--minbytes", type=byte_size, metavar="SIZE", help="smallest size (default 8)")
    sizes.add_argument("-e", "--maxbytes", type=byte_size, metavar="SIZE", help="largest size (default 256M)")
    sizes.add_argument(
        "-f", "--stepfactor", type=within(int, 2, 1024), metavar="N", help="from size to size (default 2)"
    )
    return sizes


def series_of(given: argparse.Namespace, largest: int = 256 << 20) -> list[int]:
    """The sizes of -b, -e and -f. `largest` is the default of -e, or -b if that is larger. Raises ValueError."""
    begin = 8 if given.minbytes is None else given.minbytes
    end = max(begin, largest) if given.maxbytes is None else given.maxbytes
    return size_series(begin, end, given.stepfactor or 2)


def add_length(parser: argparse.ArgumentParser, of: str, repeats: str) -> argparse._ArgumentGroup:
    """`of`: what one backend does at a time; `repeats`: what --repeats says."""
    length = parser.add_argument_group("how long")
    length.add_argument(
        "-n",
        "--iters",
        type=within(int, 1, 100_000),
        metavar="N",
        dest="iterations",
        help=f"iterations of a {of} (default: as many as there is time for)",
    )
    length.add_argument(
        "-w",
        "--warmup_iters",
        type=within(int, 0, 10_000),
        metavar="N",
        dest="warmup",
        help=f"warm-ups of a {of} (default: a sixth of the iterations)",
    )
    length.add_argument("--repeats", type=within(int, 1, 1000), metavar="N", help=repeats)
    return length


def add_programs(group: argparse._ArgumentGroup, *, driver: bool = True) -> None:
    group.add_argument("--library", type=Path, metavar="PATH", help="libnccl-net.so (default: the package's)")
    if driver:
        group.add_argument("--driver", type=Path, metavar="PATH", help="bagua-net-driver (default: the package's)")


def add_network(parser: argparse.ArgumentParser, interface: str, *, address: bool = True) -> argparse._ArgumentGroup:
    network = parser.add_argument_group("network")
    network.add_argument("--interface", metavar="NAME", help=interface)
    if address:
        network.add_argument("--address", metavar="IP", help="an address of this host instead of an interface")
    network.add_argument(
        "--timeout",
        type=within(float, 1, 3600),
        default=60.0,
        metavar="S",
        dest="timeout_s",
        help="for anything that makes no progress (default 60)",
    )
    network.add_argument(
        "--port", type=within(int, 1, 65535), metavar="N", help="where launched ranks meet on rank 0's host"
    )
    network.add_argument("--local", action="store_true", help="run here alone even if a launcher's variables are set")
    return network


def add_results(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    output = parser.add_argument_group("results")
    output.add_argument(
        "--json", type=Path, metavar="PATH", dest="json_path", help="every figure and the machine's facts"
    )
    output.add_argument("--csv", type=Path, metavar="PATH", dest="csv_path", help="one row per figure")
    return output


def options_of(kind: type[_Options], given: argparse.Namespace, **made: object) -> _Options:
    """A dataclass of what was given, with `made` over it."""
    values: dict[str, Any] = {**vars(given), **made}
    return kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]
