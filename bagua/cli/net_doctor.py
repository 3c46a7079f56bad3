"""`bagua-net doctor`: would a job here use the plugin, and if not, why not?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from bagua.cli.errors import EXIT_FAILURE

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands
    from bagua.cli.terminal import Terminal
    from bagua.net.doctor.finding import Finding, Report

_COLOURS = {"ok": "32", "warn": "33", "FAIL": "1;31", "skip": "2"}
_MARK_WIDTH = max(map(len, _COLOURS))


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="find out whether a job would use the plugin",
        description="Examines the library, the activation, NCCL, the network and the settings, and sends data through "
        "the plugin. Exit code 0: no check failed.",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.cli.terminal import Terminal
    from bagua.net.activation import original_environment
    from bagua.net.doctor.examination import examine

    report = examine(original_environment())
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(_rendered(report, Terminal.of_stdout()))
    return 0 if report.is_usable else EXIT_FAILURE


def _rendered(report: Report, terminal: Terminal) -> str:
    blocks = [f"{terminal.bold('bagua-net doctor')}, version {report.version}, {report.python}"]
    for section in report.sections:
        lines = [terminal.bold(section.title)]
        lines += [_finding(finding, terminal) for finding in section.findings]
        if section.table:
            lines.append(terminal.columns(section.table, " " * (_MARK_WIDTH + 4)))
        blocks.append("\n".join(lines))
    blocks.append(_conclusion(report, terminal))
    return "\n\n".join(blocks)


def _finding(finding: Finding, terminal: Terminal) -> str:
    mark = finding.status.value
    indent = " " * (_MARK_WIDTH + 4)
    text = terminal.wrapped(finding.text, indent)
    # Coloured after wrapping: escape sequences have no width.
    shown = f"  {terminal.coloured(mark, _COLOURS[mark])}{' ' * (_MARK_WIDTH - len(mark) + 2)}{text[len(indent) :]}"
    if finding.remedy:
        shown += "\n" + terminal.wrapped(finding.remedy, indent + "   ", indent + "-> ")
    return shown


def _conclusion(report: Report, terminal: Terminal) -> str:
    nccl = next((section for section in report.sections if section.name == "nccl"), None)
    if report.is_usable and nccl is not None and nccl.status.value == "skip":
        return terminal.coloured("No check failed. GPU jobs cannot run on this machine.", _COLOURS["ok"])
    if report.is_usable:
        return terminal.coloured("A job started in this environment would use the plugin.", _COLOURS["ok"])
    failed = ", ".join(section.title for section in report.sections if section.status.value == "FAIL")
    return terminal.coloured(
        f"A job started in this environment would NOT use the plugin. Failed checks: {failed}.", _COLOURS["FAIL"]
    )
