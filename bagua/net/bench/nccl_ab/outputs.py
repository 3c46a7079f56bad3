"""--json, --csv and --plot of the GPU comparison: every contender's figures, whatever the table on the screen shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bagua.net.bench.export import write_csv, write_json
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.nccl_ab.contender import Contender
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.options import NcclOptions
from bagua.net.bench.nccl_ab.report import hand_tuned_names, has_envelope
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME, NOISE, Results
from bagua.net.bench.nccl_ab.run import RunOutcome
from bagua.net.bench.plot import write_plot


def write_outputs(
    options: NcclOptions,
    results: Results,
    groups: Sequence[Group],
    outcome: RunOutcome,
    machine: MachineFacts,
    *,
    parameters: Mapping[str, object],
    notes: Sequence[str],
    device: str,
    ranks: int,
    setting: str,
) -> list[Path]:
    """The files that were written."""
    written = []
    if options.json_path is not None:
        summary = {
            "speedups": [ratio.as_dict() for ratio in results.ratios],
            "best_tuned": [best.as_dict() for best in results.best],
            "noise": NOISE,
            "networks": {group.contender.name: [proof.as_dict() for proof in group.proofs] for group in groups},
            "notes": [*notes, *outcome.notes],
            "expected_s": outcome.expected_s,
            "stopped_early": outcome.stopped_early,
            "errors": outcome.errors,
        }
        write_json(options.json_path, results.rows, machine, parameters=parameters, summary=summary)
        written.append(options.json_path)
    if options.csv_path is not None:
        write_csv(options.csv_path, results.rows, machine)
        written.append(options.csv_path)
    if options.plot_path is not None and results.rows:
        first = results.rows[0].collective
        contenders = [group.contender for group in groups]
        write_plot(
            options.plot_path,
            plotted_rows(results, contenders, first),
            title=f"NCCL {first}, {ranks} x {device}",
            caption=f"{setting}\n{machine.caption()}",
            faint=hand_tuned_names(contenders) if has_envelope(contenders) else (),
            faint_label="each hand-tuned setting",
        )
        written.append(options.plot_path)
    return written


def plotted_rows(results: Results, contenders: Sequence[Contender], collective: str) -> list[Measurement]:
    """With many hand-tuned settings the best of each size, as one line, after NCCL's default."""
    rows = [row for row in results.rows if row.collective == collective]
    if not has_envelope(contenders):
        return rows
    best = [replace(found.row, contender=BEST_TUNED_NAME) for found in results.best_of(collective).values()]
    default = [row for row in rows if row.contender == contenders[0].name]
    return [*default, *best, *(row for row in rows if row.contender != contenders[0].name)]
