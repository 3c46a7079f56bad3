"""`bagua-net doctor`: would a job here use the plugin, and if not, why not?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.cli import net_doctor_peer
from bagua.cli.doctor_report import COLOURS, failed_checks, rendered, warned_checks
from bagua.cli.parsers import Subcommands
from bagua.cli.terminal import Terminal
from bagua.command_exit import EXIT_FAILURE, EXIT_USAGE, CommandError

if TYPE_CHECKING:
    from bagua.net.doctor.finding import Report


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="find out whether a job would use the plugin",
        description="Examines the library, the activation, NCCL, the network, the settings and the "
        "protection, and sends data through the plugin. With --peer it examines the network between two hosts. Exit "
        "code 0: no check failed.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--report",
        nargs="?",
        const="bagua-net-report.json",
        metavar="FILE",
        help="write what to attach to a report of a problem, without secrets (default: bagua-net-report.json)",
    )
    net_doctor_peer.add_arguments(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    if net_doctor_peer.is_asked(options):
        if options.report is not None:
            raise CommandError("--report describes this host alone; give it without --peer and --serve", EXIT_USAGE)
        return net_doctor_peer.execute(options)
    from bagua.net.activation import original_environment
    from bagua.net.doctor.examination import examine

    report = examine(original_environment())
    if options.report is not None:
        return _write_report(report, options.report)
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        terminal = Terminal.of_stdout()
        print(rendered(report, _conclusion(report, terminal), terminal))
    return 0 if report.is_usable else EXIT_FAILURE


def _write_report(report: Report, file: str) -> int:
    from bagua.net.activation import original_environment
    from bagua.net.doctor.problem_report import problem_report

    text = json.dumps(problem_report(report, original_environment()), indent=2)
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written ({error.strerror}); name another file: --report FILE") from error
    print(f"{file} is written. Secrets, host names and the home directory are left out; IP addresses are not.")
    print("Read it, then attach it to your report, with the message and the logs of the ranks.")
    return 0


def _conclusion(report: Report, terminal: Terminal) -> str:
    nccl = next((section for section in report.sections if section.name == "nccl"), None)
    if report.is_usable:
        warned = warned_checks(report)
        found = f"No check failed, {warned}. " if warned else ""
        use = "A job started in this environment would use the plugin."
        if nccl is not None and nccl.status.value == "skip":
            found, use = found or "No check failed. ", "GPU jobs cannot run on this machine."
        return _closing(found + use, "warn" if warned else "ok", terminal)
    text = f"A job started in this environment would NOT use the plugin. Failed checks: {failed_checks(report)}."
    return _closing(text, "FAIL", terminal)


def _closing(text: str, status: str, terminal: Terminal) -> str:
    return terminal.coloured(terminal.wrapped(text, ""), COLOURS[status])
