"""The result file: the one JSON form that every measurement tool writes, and that docs/results keeps.

A file holds the figures of one command on one machine. The tables and plots of the documentation are generated from
these files, so a figure on a page can be traced to its command, commit and spread.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bagua.net.bench.machine import MachineFacts, source_commit
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.verdict import PairedRatio

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


_FACTS = ("cpu_model", "cpus_usable", "kernel", "tcp_congestion_control", "link_speeds_mbps")
_BACKENDS = {
    "NCCL default": "nccl",
    "best tuned": "nccl_tuned_best",
    "shared memory": "nccl_shared_memory",
    "bagua-net": "plugin",
    "plugin-1": "plugin_one_stream",
}


def backend_label(name: str) -> str:
    return _BACKENDS.get(name, name.lower().replace("-", "_").replace(" ", "_"))


def figures(case: Mapping[str, Label], values: Mapping[tuple[str, str], Sequence[float | None]]) -> list[Figure]:
    """One for each (metric, unit) that has a finite value: the median of the repetitions."""
    found = []
    for (metric, unit), all_values in values.items():
        known = [value for value in all_values if value is not None and math.isfinite(value)]
        if known:
            low, high = (min(known), max(known)) if len(known) > 1 else (None, None)
            found.append(Figure(dict(case), metric, unit, statistics.median(known), low, high, len(known)))
    return found


def speedup(case: Mapping[str, Label], backend: str, baseline: str, ratio: PairedRatio) -> Figure:
    """Of `backend` over `baseline`: above 1 it takes less time."""
    labels = {**case, "backend": backend_label(backend), "baseline": backend_label(baseline)}
    return Figure(labels, "speedup", "x", ratio.median, ratio.low, ratio.high, ratio.repetitions)


def measurement_case(row: Measurement, *, ranks: int, gpus: int = 0, **more: Label) -> dict[str, Label]:
    name, _, streams = row.backend.partition(" x")
    labels: dict[str, Label] = {"backend": backend_label(name), "collective": row.collective, "size_bytes": row.bytes}
    return {**labels, **({"streams": int(streams)} if streams else {}), "ranks": ranks, "gpus": gpus, **more}


def measurement_figures(row: Measurement, case: Mapping[str, Label]) -> list[Figure]:
    slowest, fastest = row.busbw_range_gb_s
    count = row.repetitions
    return [
        Figure(case, "time", "us", row.time_us, row.time_min_us, row.time_max_us, count),
        Figure(case, "busbw", "GB/s", row.busbw_gb_s, slowest, fastest, count),
        *figures(
            case,
            {
                ("latency_p50", "us"): [row.latency_us(50)],
                ("latency_p99", "us"): [row.latency_us(99)],
                ("cpu", "s/GB"): [row.cpu_s_per_gb],
                ("of_raw", "%"): [None if row.share_of_raw is None else row.share_of_raw * 100],
            },
        ),
    ]


def result_of(
    title: str,
    found: Sequence[Figure],
    *,
    machine: MachineFacts,
    parameters: Mapping[str, object],
    versions: Mapping[str, object] | None = None,
    gpu: str | None = None,
    notes: Sequence[str] = (),
) -> ResultFile:
    """`versions`: beside those of bagua and Python; None and what has no value is left out."""
    known = asdict(machine)
    facts = {name: known[name] for name in _FACTS} | ({} if gpu is None else {"gpu": gpu})
    others = {name: str(version) for name, version in (versions or {}).items() if version}
    settings = {"environment": machine.environment} if machine.environment else {}
    return ResultFile(
        title=title,
        command=machine.command_line,
        date=machine.date,
        commit=source_commit(machine.package_version),
        machine=facts,
        versions={"bagua": machine.package_version, "python": machine.python_version, **others},
        figures=tuple(found),
        parameters={**parameters, **settings},
        notes=tuple(notes),
    )


def write_files(result: ResultFile, json_path: Path | None, csv_path: Path | None) -> list[Path]:
    """--json and --csv, and the files that were written."""
    if json_path is not None:
        write_result(json_path, result)
    if csv_path is not None:
        write_csv(csv_path, result)
    return [path for path in (json_path, csv_path) if path is not None]


def write_csv(path: Path, result: ResultFile) -> None:
    """A row a figure: the labels of its case, metric, unit, median, low, high, repetitions."""
    labels = list(dict.fromkeys(name for figure in result.figures for name in figure.case))
    quantity = ("metric", "unit", "median", "low", "high", "repetitions")
    with path.open("w", encoding="utf-8", newline="") as file:
        for name, value in {**result.machine, **result.versions, "command": result.command}.items():
            file.write(f"# {name}: {json.dumps(value)}\n")
        writer = csv.DictWriter(file, [*labels, *quantity], lineterminator="\n")
        writer.writeheader()
        for figure in result.figures:
            writer.writerow({**figure.case, **{name: getattr(figure, name) for name in quantity}})
