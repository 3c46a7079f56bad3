"""The output of a tool: heading, table and closing lines on stdout, a result file, and all samples as JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from bagua.net.bench.api import MISSING, Figure, GpuSharing, MachineFacts, describe_machine, result_of, write_result


@dataclass
class Report:
    """
    Attributes:
        title: The title of the result file.
        lines: The lines after the table.
        facts: What the ranks reported about themselves: torch, nccl, device.
        parameters: Parameters of the result file in addition to the options.
        rows, samples: Dataclasses that --details writes.
        written: Files that the tool has already written.
    """

    title: str
    heading: str
    table: str
    figures: list[Figure]
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)

    def publish(self, given: argparse.Namespace, machine: MachineFacts | None = None) -> int:
        """Prints and writes the report. Returns the exit status: 1 if there are errors or no measurements."""
        if self.rows:
            print(f"{self.heading}\n\n{self.table}")
        for line in (*self.lines, *(f"note: {one}" for one in self.notes), *(f"ERROR: {one}" for one in self.errors)):
            print(line)
        self.written += self.write(given, machine or describe_machine())
        if self.written:
            print("written: " + ", ".join(map(str, self.written)))
        return 1 if self.errors or not self.rows else 0

    def write(self, given: argparse.Namespace, machine: MachineFacts) -> list[Path]:
        """Writes the files of --json and --details, and returns their paths."""
        parameters = plain({**vars(given), **self.parameters})
        if given.json is not None:
            device = self.facts.get("device")
            result = result_of(
                self.title,
                self.figures,
                machine=machine,
                parameters=parameters,
                versions={name: self.facts.get(name) for name in ("torch", "nccl")},
                gpu=None if device == "cpu" else device,
                notes=[*self.notes, *self.errors],
            )
            write_result(given.json, result)
        if given.details is not None:
            facts = {"machine": machine.as_dict(), "ranks": dict(self.facts), "parameters": parameters}
            said = {"notes": list(self.notes), "errors": list(self.errors)}
            turns = {"summary": list(self.rows), "turns": list(self.samples)}
            write_json(given.details, {**facts, **said, **turns})
        return [path for path in (given.json, given.details) if path is not None]


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without paths, with dataclasses as dictionaries."""
    values = {name: value for name, value in parameters.items() if not isinstance(value, Path)}
    return {name: asdict(value) if is_dataclass(value) else value for name, value in values.items()}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes infinities and NaN as null, because JSON has neither."""
    path.write_text(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return _finite(asdict(value))
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def number(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)


def format_ms(value: float) -> str:
    """Three to four significant digits: 0.938, 9.38, 93.8, 938."""
    if value < 1:
        return f"{value:.3f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def ranks_text(given: argparse.Namespace, facts: Mapping[str, Any]) -> str:
    """The number of ranks, their device and versions, for a heading."""
    sharing: GpuSharing | None = given.sharing
    device = device_text(facts.get("device", "?"), sharing)
    nccl = f", NCCL {facts['nccl']}" if facts.get("nccl") else ""
    threads = facts.get("threads", "?")
    each = f", {threads} thread{'' if threads == 1 else 's'} each" if given.device == "cpu" else ""
    return f"{given.ranks} ranks on {device}, torch {facts.get('torch', '?')}{nccl}{each}"


def device_text(name: object, sharing: GpuSharing | None) -> str:
    """The device of the ranks, and how they share it."""
    return str(name) if sharing is None else f"{name}, {sharing}"


def sharing_notes(given: argparse.Namespace) -> list[str]:
    return [] if given.sharing is None else [given.sharing.note]
