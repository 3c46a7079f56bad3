"""Labels and figures of the result files that several tools write (bagua.net.bench.result_file)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bagua.net.bench.api import Figure, GpuSharing, Label, backend_label, figures

_NAMES = {
    "with-bagua": "gradient_allreduce",
    "decentralized-shift-one": "shift_one",
    "decentralized-shift_one": "shift_one",
}


def name_of(choice: str) -> str:
    """The label of an algorithm or a backend."""
    return _NAMES.get(choice, backend_label(choice))


def case_of(ranks: int, device: str, sharing: GpuSharing | None, **labels: Label) -> dict[str, Label]:
    gpus = 0 if device == "cpu" else ranks if sharing is None else sharing.gpus
    return {**labels, "ranks": ranks, "gpus": gpus}


def step_figures(rows: Iterable[Any], case: Mapping[str, Label]) -> list[Figure]:
    """Of rows of measure.core.step_statistics."""
    found = []
    for row in rows:
        labels = {"model": row.model, "algorithm": name_of(row.algorithm), **case}
        found += figures(
            labels,
            {
                ("step_time", "ms"): row.step_ms_by_round,
                ("memory", "MiB"): [row.steps_peak_mib],
                ("cpu", "%"): [row.busy_percent],
                ("steps_per_average", "steps"): [row.steps_per_averaging],
            },
        )
        if (ratio := row.speed_up) is not None:
            found.append(Figure(labels, "speedup", "x", ratio.median, ratio.low, ratio.high, row.rounds))
    return found
