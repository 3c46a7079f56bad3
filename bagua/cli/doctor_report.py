"""How a report of `bagua-net doctor` is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.cli.terminal import Terminal

if TYPE_CHECKING:
    from bagua.net.doctor.finding import Finding, Report

COLOURS = {"ok": "32", "warn": "33", "FAIL": "1;31", "skip": "2"}
_NAME = "bagua-net doctor"
_MARK_WIDTH = max(map(len, COLOURS))


def rendered(report: Report, conclusion: str, terminal: Terminal) -> str:
    head = terminal.wrapped(f"{_NAME}, version {report.version}, {report.python}", "")
    # Made bold after wrapping: escape sequences have no width.
    blocks = [terminal.bold(_NAME) + head.removeprefix(_NAME)]
    for section in report.sections:
        lines = [terminal.bold(section.title)]
        lines += [_finding(finding, terminal) for finding in section.findings]
        if section.table:
            lines.append(terminal.columns(section.table, " " * (_MARK_WIDTH + 4)))
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, conclusion])


def failed_checks(report: Report) -> str:
    return ", ".join(section.title for section in report.sections if section.status.value == "FAIL")


def warned_checks(report: Report) -> str:
    """Such as "2 warnings (Settings)", or "" without any."""
    titles = [one.title for one in report.sections for finding in one.findings if finding.status.value == "warn"]
    if not titles:
        return ""
    return f"{len(titles)} warning{'s' if len(titles) > 1 else ''} ({', '.join(dict.fromkeys(titles))})"


def _finding(finding: Finding, terminal: Terminal) -> str:
    mark = finding.status.value
    indent = " " * (_MARK_WIDTH + 4)
    text = terminal.wrapped(finding.text, indent)
    # Coloured after wrapping: escape sequences have no width.
    shown = f"  {terminal.coloured(mark, COLOURS[mark])}{' ' * (_MARK_WIDTH - len(mark) + 2)}{text[len(indent) :]}"
    if finding.remedy:
        shown += "\n" + terminal.wrapped(finding.remedy, indent + "   ", indent + "-> ")
    return shown
