"""What each comparison writes with --json: a result file (bagua.net.bench.result_file)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.net.bench.figures import backend_label, figures, result_of
from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.result_file import Figure, Label, write_result

_NAMES = {
    "with-bagua": "gradient_allreduce",
    "decentralized-shift-one": "shift_one",
    "decentralized-shift_one": "shift_one",
}
_MIB = 1 << 20


def name_of(choice: str) -> str:
    """The label of an algorithm or a backend."""
    return _NAMES.get(choice, backend_label(choice))


def case_of(ranks: int, device: str, sharing: GpuSharing | None, **labels: Label) -> dict[str, Label]:
    gpus = 0 if device == "cpu" else ranks if sharing is None else sharing.gpus
    return {**labels, "ranks": ranks, "gpus": gpus}


def step_figures(rows: Iterable[Any], case: Mapping[str, Label]) -> list[Figure]:
    """Of rows of core_comparison.step_statistics."""
    found = []
    for row in rows:
        labels = {"model": row.model, "algorithm": name_of(row.algorithm), **case}
        found += figures(
            labels,
            {
                ("step_time", "ms"): row.step_ms_by_round,
                ("memory", "MiB"): [row.steps_peak_mib],
                ("cpu", "%"): [None if row.machine_busy is None else row.machine_busy * 100],
                ("steps_per_average", "steps"): [row.steps_per_averaging],
            },
        )
        if (ratio := row.speed_up) is not None:
            found.append(Figure(labels, "speedup", "x", ratio.median, ratio.low, ratio.high, row.rounds))
    return found


def memory_figures(rows: Iterable[Any], case: Mapping[str, Label]) -> list[Figure]:
    """Of rows of memory_measurement.report: beyond plain training."""
    found = []
    for row in rows:
        found += figures(
            {"model": "linear", "algorithm": name_of(row.case), "parameters": row.parameters, **case},
            {
                ("memory", "MiB"): [row.peak / _MIB],
                ("memory_kept", "MiB"): [row.kept / _MIB],
                ("memory_kept_stated", "MiB"): [row.kept_stated / _MIB],
                ("memory_fresh_gradients", "MiB"): [row.peak_with_fresh_gradients / _MIB],
                ("memory_per_parameter", "B"): [row.peak / row.parameters],
            },
        )
    return found


def convergence_figures(
    trainings: Sequence[Any], baseline_of: Mapping[tuple[str, str], str | None], case: Mapping[str, Label]
) -> list[Figure]:
    """Of convergence_comparison.statistics.TrainingResult. Repetitions are seeds; differences from the baseline are
    taken within a seed. `baseline_of`: by task and algorithm."""
    found = []
    for (task, name), baseline in baseline_of.items():
        mine = {one.seed: one for one in trainings if (one.task, one.case) == (task, name)}
        other = {one.seed: one for one in trainings if (one.task, one.case) == (task, baseline)}
        pairs = [(mine[seed], other[seed]) for seed in mine if seed in other]
        labels = {"model": task, "algorithm": name_of(name), **case}
        values: dict[tuple[str, str], Sequence[float | None]] = {
            ("accuracy", "%"): [None if one.accuracy is None else one.accuracy * 100 for one in mine.values()],
            ("train_loss", ""): [one.train_loss for one in mine.values()],
            ("loss", ""): [one.test_loss for one in mine.values()],
            ("loss_difference", "%"): [(one.test_loss / base.test_loss - 1) * 100 for one, base in pairs],
        }
        found += figures(labels, values)
        for point, epoch in enumerate(next(iter(mine.values())).curve_epochs if mine else ()):
            curve = [one.curve_loss[point] for one in mine.values()]
            found += figures({**labels, "epoch": round(epoch, 3)}, {("loss", ""): curve})
    return found


def write(
    path: Path,
    title: str,
    found: Sequence[Figure],
    *,
    machine: MachineFacts,
    ranks: Mapping[str, Any],
    parameters: Mapping[str, object],
    notes: Sequence[str] = (),
) -> None:
    """`ranks`: what the ranks said of themselves (torch, nccl, device)."""
    plain = {name: value for name, value in parameters.items() if not isinstance(value, Path)}
    device = ranks.get("device")
    versions = {name: ranks.get(name) for name in ("torch", "nccl")}
    gpu = None if device == "cpu" else device
    write_result(
        path, result_of(title, found, machine=machine, parameters=plain, versions=versions, gpu=gpu, notes=notes)
    )
