"""`bagua-net stats`: what the processes of this host do, from outside."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from bagua.cli.parsers import Subcommands
from bagua.cli.terminal import Terminal, width_of_stdout
from bagua.command_exit import EXIT_FAILURE, CommandError
from bagua.net.bench.command_line import within

if TYPE_CHECKING:
    from bagua.net.stats import HostReport, Snapshot

_DEFAULT_INTERVAL_S = 1.0
_CLEAR = "\x1b[H\x1b[J"


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "stats",
        help="show what the processes of this host do",
        description="Shows traffic, connections, retransmits and stalls of every process on this host that uses "
        "Bagua-Net and that this user may look at: its own, or with root all. The processes are not disturbed.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch one line per interval")
    parser.add_argument("--watch", action="store_true", help="repeat until interrupted")
    parser.add_argument(
        "--interval",
        type=within(float, 0.1, 3600.0),
        default=_DEFAULT_INTERVAL_S,
        metavar="S",
        help=f"seconds that rates are measured over (default {_DEFAULT_INTERVAL_S:g})",
    )
    parser.add_argument("--pid", type=within(int, 1, 1 << 22), metavar="PID", help="only this process")
    parser.add_argument("--streams", action="store_true", help="show each data stream")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.net.stats import report

    earlier = _snapshot(options)
    # Nothing to measure: do not keep the user waiting.
    if not options.watch and not earlier.processes:
        return _show(options, report(None, earlier))
    while True:
        time.sleep(options.interval)
        later = _snapshot(options)
        code = _show(options, report(earlier, later))
        if not options.watch:
            return code
        earlier = later


def _snapshot(options: argparse.Namespace) -> Snapshot:
    from bagua.net.stats import StatsError, snapshot

    try:
        return snapshot(options.pid)
    except StatsError as error:
        raise CommandError(str(error)) from error


def _show(options: argparse.Namespace, report: HostReport) -> int:
    if options.json:
        print(json.dumps(report.as_json(), indent=None if options.watch else 2), flush=True)
    else:
        _show_text(options, report)
    if report.processes:
        return 0
    if not options.watch:
        print(f"bagua-net stats: {none_found(report, options.pid)}", file=sys.stderr)
    return EXIT_FAILURE


def _show_text(options: argparse.Namespace, report: HostReport) -> None:
    from bagua.cli.stats_table import rendered

    terminal = Terminal.of_stdout()
    if report.processes or report.problems:
        text = rendered(report, terminal, width_of_stdout(), streams=options.streams)
    elif options.watch:
        text = none_found(report, options.pid)
    else:
        return
    print((_CLEAR if options.watch and sys.stdout.isatty() else "") + text, flush=True)


def none_found(report: HostReport, pid: int | None) -> str:
    if report.problems:
        return f"None of the processes on {report.host} that use Bagua-Net can be shown."
    looked = (
        f"Processes of other users ({report.denied} or more) were not looked at: only they and root may."
        if report.denied
        else "A process is found as soon as NCCL has loaded the plugin in it, unless it has BAGUA_NET_STATS=0."
    )
    remedy = "Run the command with sudo, or" if report.denied else "Start the job first;"
    who = (
        f"No process on {report.host} uses Bagua-Net" if pid is None else f"Process {pid} shows no Bagua-Net statistics"
    )
    return f"{who}.\n{looked}\n{remedy} check with `bagua-net doctor` that jobs use the plugin."
