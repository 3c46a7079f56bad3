"""From samples to the figures of a result file, and the result file of one run."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua.net.bench.machine import MachineFacts, source_commit
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.result_file import Figure, Label, ResultFile, write_result
from bagua.net.bench.verdict import PairedRatio

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
                ("latency_p50", "us"): [row.latency_p50_us],
                ("latency_p99", "us"): [row.latency_p99_us],
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
    known = machine.as_dict()
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
