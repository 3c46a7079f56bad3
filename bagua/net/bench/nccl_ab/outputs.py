"""--json and --csv of the GPU comparison: every backend's figures, whatever the table on the screen shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bagua.net.bench.figures import measurement_case, measurement_figures, result_of, speedup, write_files
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.options import NcclOptions
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME, Ratio, Results
from bagua.net.bench.result_file import Figure, Label


def write_outputs(
    options: NcclOptions,
    results: Results,
    groups: Sequence[Group],
    machine: MachineFacts,
    *,
    parameters: Mapping[str, object],
    notes: Sequence[str],
    errors: Sequence[str],
    device: str,
    ranks: int,
    gpus: int,
    setting: str,
) -> list[Path]:
    """The files that were written."""
    networks = {group.backend.name: [proof.as_dict() for proof in group.proofs] for group in groups}
    result = result_of(
        f"NCCL with and without the plugin: {setting}",
        _figures(results, ranks, gpus),
        machine=machine,
        parameters={**parameters, "networks": networks},
        versions={name: parameters.get(name) for name in ("torch", "nccl")},
        gpu=device if gpus else None,
        notes=[*notes, *(f"ERROR: {error}" for error in errors)],
    )
    return write_files(result, options.json_path, options.csv_path)


def _figures(results: Results, ranks: int, gpus: int) -> list[Figure]:
    found = [
        one for row in results.rows for one in measurement_figures(row, measurement_case(row, ranks=ranks, gpus=gpus))
    ]

    def add(ratio: Ratio, baseline: str) -> None:
        labels: dict[str, Label] = {
            "collective": ratio.case.collective,
            "size_bytes": ratio.case.bytes,
            "ranks": ranks,
            "gpus": gpus,
        }
        found.append(speedup(labels, "bagua-net", baseline, ratio.speedup))

    for ratio in results.ratios:
        add(ratio, ratio.baseline)
    for best in results.best:
        row = replace(best.row, backend=BEST_TUNED_NAME)
        case = measurement_case(row, ranks=ranks, gpus=gpus, setting=best.setting)
        found += measurement_figures(row, case)
        if best.ratio is not None:
            add(best.ratio, BEST_TUNED_NAME)
    return found
