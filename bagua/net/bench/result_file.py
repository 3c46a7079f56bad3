"""The result file: the one JSON form that every measurement tool writes, and that docs/results keeps.

A file holds the figures of one command on one machine. The tables and plots of the documentation are generated from
these files, so a figure on a page can be traced to its command, commit and spread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Raised when a field changes its meaning; new fields do not raise it.
SCHEMA_VERSION = 2

Label = str | int | float | bool | None


@dataclass(frozen=True)
class Figure:
    """One measured quantity of one case.

    Args:
        case: what was measured, e.g. {"backend": "plugin", "collective": "all_reduce", "size_bytes": 1048576}.
        metric: name of the quantity, e.g. "busbw", "time", "step_time", "cpu", "speedup".
        unit: "GB/s", "us", "ms", "s/GB", "x", "%", "MiB", "steps"; GB are 10^9 bytes.
        median: over the repetitions.
        low, high: the smallest and the largest repetition; None where a single one was taken.
        repetitions: how many; None where it is not known.
    """

    case: Mapping[str, Label]
    metric: str
    unit: str
    median: float
    low: float | None = None
    high: float | None = None
    repetitions: int | None = 1


@dataclass(frozen=True)
class ResultFile:
    """What one command measured.

    Args:
        title: a line that says what was measured, e.g. "All-reduce, two ranks on one H200".
        command: as typed in a shell; None where it is not known.
        date: ISO 8601, UTC.
        commit: full or abbreviated hash of the code that was measured; None where it is not known.
        machine: facts, e.g. {"cpu_model": ..., "cpus_usable": ..., "gpu": ..., "kernel": ...,
            "tcp_congestion_control": ...}.
        versions: {"bagua": ..., "python": ..., "torch": ..., "nccl": ...}, those that matter.
        parameters: options in effect, for readers; generators do not interpret them.
        figures: the measurements.
        notes: whole sentences that a reader of the figures needs: what went wrong, what limits them.
    """

    title: str
    command: str | None
    date: str
    commit: str | None
    machine: Mapping[str, object]
    versions: Mapping[str, str]
    figures: tuple[Figure, ...]
    parameters: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def find(self, metric: str, **case: Label) -> Figure:
        """The one figure with this metric whose case has at least these labels.

        Raises:
            LookupError: there is none, or more than one.
        """
        found = self.select(metric, **case)
        if len(found) != 1:
            raise LookupError(f"{len(found)} figures of {metric!r} match {case!r} in {self.title!r}; exactly 1 must")
        return found[0]

    def select(self, metric: str, **case: Label) -> list[Figure]:
        """All figures with this metric whose case has at least these labels, in the order of the file."""
        return [
            figure
            for figure in self.figures
            if figure.metric == metric and all(figure.case.get(name) == value for name, value in case.items())
        ]


def write_result(path: Path, result: ResultFile) -> None:
    """Write `result` as JSON, one figure a line so that changes are readable in a diff.

    Raises:
        ValueError: a figure is not finite.
        OSError: the file cannot be written.
    """
    document = {"schema": SCHEMA_VERSION, **asdict(result)}
    figures = document.pop("figures")
    head = json.dumps(document, indent=2, allow_nan=False).removesuffix("\n}")
    lines = ",\n    ".join(json.dumps(figure, allow_nan=False) for figure in figures)
    body = f"[\n    {lines}\n  ]" if figures else "[]"
    path.write_text(f'{head},\n  "figures": {body}\n}}\n', encoding="utf-8")


def read_result(path: Path) -> ResultFile:
    """Read a file that `write_result` wrote.

    Raises:
        ValueError: it is not such a file, or of another schema; names the file.
        OSError: the file cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        schema = document.pop("schema")
        if schema != SCHEMA_VERSION:
            raise ValueError(f"{path}: result file of schema {schema}; this version reads schema {SCHEMA_VERSION}")
        document["figures"] = tuple(Figure(**figure) for figure in document["figures"])
        document["notes"] = tuple(document["notes"])
        return ResultFile(**document)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a result file ({error})") from error
