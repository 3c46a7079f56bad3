"""`bagua-net blame`: which process holds a job up."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bagua.cli.net_stats import none_found
from bagua.cli.net_top import add_host_options, sources_of
from bagua.cli.parsers import Subcommands
from bagua.cli.terminal import Column, Terminal, table, width_of_stdout
from bagua.command_exit import EXIT_FAILURE, EXIT_USAGE, CommandError
from bagua.net.bench.command_line import within

if TYPE_CHECKING:
    from bagua.net.blame.verdict import Verdict
    from bagua.net.stats import HostReport

_LEAST_S = 5.0


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "blame",
        help="name the process that holds a job up",
        description="Follows who waits for whom through the processes that use Bagua-Net, on one or several hosts, to "
        "the ones that have ended, are stopped, or have not posted their part. The processes are not disturbed. The "
        "exit code is 0 if nobody waits, and 1 if somebody does, no process was found, or a host was not reached.",
    )
    add_host_options(parser)
    parser.add_argument(
        "--after",
        type=within(float, 0.1, 86400.0),
        default=_LEAST_S,
        metavar="S",
        help=f"shorter waits are normal (default {_LEAST_S:g} seconds)",
    )
    parser.add_argument(
        "--ras",
        metavar="HOST:PORT",
        help="NCCL's RAS service, which is asked as well if ranks wait (default: NCCL_RAS_ADDR, or localhost:28028)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(execute=execute, interval=0.2)


def execute(options: argparse.Namespace) -> int:
    from bagua.host_port import require_port
    from bagua.net.blame import ras
    from bagua.net.blame.verdict import verdict
    from bagua.net.stats.sources import second_reports

    if options.ras:
        try:
            require_port(options.ras)
        except ValueError as error:
            raise CommandError(f"--ras {options.ras}: {error}", EXIT_USAGE) from error
    sources = sources_of(options)
    reports: list[HostReport] = []
    silent: list[str] = []
    failed = False
    try:
        for state in second_reports(sources):
            if state.problem is not None or state.report is None:
                print(f"bagua-net blame: {state.name}: {state.problem or 'no report within 30 s'}", file=sys.stderr)
                failed = True
            if state.report is None:
                silent.append(state.name)
            else:
                reports.append(state.report)
    finally:
        for source in sources:
            source.close()
    for report in reports:
        for problem in report.problems:
            print(f"bagua-net blame: {report.host}: {problem}", file=sys.stderr)
    count = sum(len(report.processes) for report in reports)
    if not count and not silent:
        raise CommandError("\n".join(none_found(report, None) for report in reports))
    found = verdict(reports, options.after, silent)
    parties = {party for wait in found.waits for party in (wait.waiter, wait.target)}
    nccl: list[str] = []
    try:
        if parties:
            nccl = ras.findings({party.pid for party in parties}, options.ras)
    except (OSError, ValueError) as error:
        if options.ras:
            print(f"bagua-net blame: NCCL's RAS service: {options.ras}: {error}", file=sys.stderr)
            failed = True
    if options.json:
        print(json.dumps({"schema": 1, "processes": count, **asdict(found), "nccl": nccl}, indent=2))
    else:
        if found.waits or count:
            print(_rendered(found, nccl, count, options.after, Terminal.of_stdout()))
    return EXIT_FAILURE if failed or found.waits else 0


def _rendered(found: Verdict, nccl: Sequence[str], processes: int, after_s: float, terminal: Terminal) -> str:
    if not found.waits:
        who = f"None of {processes} processes has" if processes > 1 else "The one process has not"
        return f"{who} waited for a peer for {after_s:g} s."
    blocks = [terminal.bold(one.problem) + f"\n{one.advice}" for one in found.culprits]
    if not blocks:
        blocks.append(
            "All that wait for each other run and wait in a circle.\n"
            "Compare the order of their collectives: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records it."
        )
    if nccl:
        blocks.append("NCCL's RAS service:\n" + "\n".join(nccl))
    columns = [
        Column("who waits", [str(one.waiter) for one in found.waits], left=True),
        Column("for", [str(one.target) for one in found.waits], left=True),
        Column("to", [one.direction for one in found.waits], 1, left=True),
        Column("since", [f"{one.seconds:.0f} s" for one in found.waits]),
        Column("requests", [str(one.requests) for one in found.waits], 2),
    ]
    blocks.append(table(columns, terminal, width_of_stdout())[0])
    return "\n\n".join(blocks)
