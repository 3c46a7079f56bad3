"""What a check has to say: findings with a remedy, collected in the sections of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Status(Enum):
    OK = "ok"
    WARN = "warn"  # a job would use the plugin, but perhaps not as the user wants
    FAIL = "FAIL"  # a job would not use the plugin
    SKIP = "skip"  # not applicable here, or not checked because another check failed


@dataclass(frozen=True)
class Finding:
    status: Status
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Section:
    name: str  # key in the JSON report
    title: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # for --json
    table: tuple[tuple[str, ...], ...] = ()  # shown below the findings; the first row is the head

    @property
    def status(self) -> Status:
        statuses = {finding.status for finding in self.findings}
        return next((status for status in (Status.FAIL, Status.WARN, Status.SKIP) if status in statuses), Status.OK)


@dataclass(frozen=True)
class Report:
    version: str
    sections: tuple[Section, ...]
    python: str = ""  # the interpreter that looked: another one may have another torch

    @property
    def is_usable(self) -> bool:
        return all(section.status is not Status.FAIL for section in self.sections)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "usable": self.is_usable,
            "bagua_version": self.version,
            "python": self.python,
            "sections": {
                section.name: {
                    "status": section.status.value.lower(),
                    "findings": [
                        {"status": finding.status.value.lower(), "text": finding.text, "remedy": finding.remedy}
                        for finding in section.findings
                    ],
                    "facts": dict(section.facts),
                }
                for section in self.sections
            },
        }


def ok(text: str) -> Finding:
    return Finding(Status.OK, text)


def warn(text: str, remedy: str = "") -> Finding:
    return Finding(Status.WARN, text, remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding(Status.FAIL, text, remedy)


def skip(text: str) -> Finding:
    return Finding(Status.SKIP, text)


def split_message(status: Status, message: str) -> Finding:
    """Messages read "what happened", then "what to do" on a line of its own or after the last semicolon."""
    text, separator, remedy = message.partition("\n")
    if not separator:
        text, separator, remedy = message.rpartition("; ")
    return Finding(status, text, remedy) if separator else Finding(status, message)
