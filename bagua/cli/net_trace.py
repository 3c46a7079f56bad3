"""`bagua-net trace merge`: traces of Bagua-Net and torch.profiler in one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bagua.cli.parsers import Subcommands
from bagua.command_exit import CommandError


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "trace",
        help="merge trace files",
        description="Works with the trace files that BAGUA_NET_TRACE=FILE makes every process write.",
    )
    commands = parser.add_subparsers(dest="trace_command", metavar="COMMAND", required=True)
    merging = commands.add_parser(
        "merge",
        help="put several traces into one file",
        description="Puts traces of Bagua-Net and torch.profiler, of one rank or several, into one file for Perfetto "
        "(ui.perfetto.dev) or chrome://tracing. Times of several hosts are as close as their clocks.",
    )
    merging.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a trace, also compressed (.gz)")
    merging.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="compressed if it ends in .gz"
    )
    merging.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.net.trace import TraceError, TraceFile, merge

    if options.output.exists() and any(options.output.samefile(path) for path in options.files if path.exists()):
        raise CommandError(f"{options.output} is one of the files to be merged\nGive --output another name.")
    try:
        files = [TraceFile.read(path) for path in options.files]
    except TraceError as error:
        raise CommandError(
            f"{error}\nGive files that BAGUA_NET_TRACE wrote, or that torch.profiler's export_chrome_trace wrote."
        ) from error
    merged = merge(files)
    try:
        merged.write(options.output)
    except OSError as error:
        raise CommandError(f"{options.output} cannot be written: {error.strerror}") from error
    for left, right in merged.apart:
        print(f"bagua-net trace: {left} and {right} have no time in common", file=sys.stderr)
    print(f"{len(merged.events)} events of {len(files)} files in {options.output}")
    return 0
