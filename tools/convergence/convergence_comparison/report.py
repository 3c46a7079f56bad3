"""What is printed and what is written of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import figures
from aligned_table import Column
from aligned_table import render as render_table
from core_comparison.report import threads_each, write_json
from device_option import device_text

from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.table import MISSING
from convergence_comparison.catalogue import CASES, TASKS, baseline_of, learning_rate_of, optimizer_of
from convergence_comparison.comparison_run import Outcome
from convergence_comparison.options import Options
from convergence_comparison.statistics import Difference, Row, Spread


def format_loss(value: float) -> str:
    """Four significant digits."""
    return f"{value:#.4g}" if math.isfinite(value) else "none"


def _spread(value: Spread | None, style: str) -> str:
    if value is None:
        return MISSING
    return f"{value.mean:{style}} ± {value.deviation:.2g}" if math.isfinite(value.mean) else "none"


def format_difference(value: Difference | None) -> str:
    if value is None:
        return MISSING
    if not math.isfinite(value.mean):
        return "none"
    return f"{value.mean:+.2f}" + ("" if value.error is None else f" ± {value.error:.2f}")


COLUMNS: tuple[Column[Row], ...] = (
    Column("task", "", lambda row: row.task, left=True),
    Column("algorithm", "", lambda row: row.case, left=True),
    Column("seeds", "", lambda row: str(row.seeds)),
    Column("train loss", "", lambda row: format_loss(row.train_loss.mean)),
    Column("to baseline", "%", lambda row: format_difference(row.train_loss_difference)),
    Column("test loss", "± of one", lambda row: _spread(row.test_loss, "#.4g")),
    Column("to baseline", "%", lambda row: format_difference(row.test_loss_difference)),
    Column("accuracy", "%, ± of one", lambda row: _spread(row.accuracy, ".2f"), optional=True),
    Column("to baseline", "points", lambda row: format_difference(row.accuracy_difference), optional=True),
    Column("apart", "part", lambda row: f"{row.spread:.1e}" if row.spread else MISSING, optional=True),
    Column(
        "one rank",
        "test loss",
        lambda row: format_loss(row.replica_test_loss) if row.spread else MISSING,
        optional=True,
    ),
    Column(
        "averaged",
        "each steps",
        lambda row: MISSING if row.steps_per_average is None else f"{row.steps_per_average:.1f}",
        optional=True,
    ),
    Column("speed", "steps/s", lambda row: f"{row.steps_per_second:.0f}"),
    Column("verdict", "", lambda row: row.verdict, left=True),
)


def render(rows: Sequence[Row], *, colour: bool = False) -> str:
    return render_table(rows, COLUMNS, block=lambda row: row.task, is_loud=lambda row: row.falls_short, colour=colour)


def heading(options: Options, outcome: Outcome) -> str:
    facts = outcome.facts
    nccl = f", NCCL {facts['nccl']}" if facts.get("nccl") else f", gloo, {threads_each(facts)}"
    device = device_text(facts.get("device", "?"), options.sharing)
    return f"{options.ranks} ranks on {device}, torch {facts.get('torch', '?')}{nccl}"


def closing_lines(rows: Sequence[Row], outcome: Outcome) -> list[str]:
    lines = []
    for task, sizes in outcome.sizes.items():
        steps = next((one.steps for one in outcome.trainings if one.task == task), 0)
        lines.append(
            f"{task}: {sizes['train_samples']} samples to train with, {sizes['test_samples']} to test,"
            f" {sizes['parameters']} parameters, {steps} steps of {TASKS[task].batch_size} samples"
        )
    if any(row.baseline for row in rows):
        lines.append(
            "to baseline: of the same seed's gradient all-reduce with the same optimizer, mean over the seeds ± its"
            " standard error; above 0 is more loss, more accuracy"
        )
    if any(row.spread for row in rows):
        lines.append("apart: a replica's largest distance from the mean of all, over its length; evaluated is the mean")
    lines += [f"note: {note}" for note in outcome.notes]
    return [*lines, *(f"ERROR: {error}" for error in outcome.errors)]


def write_document(path: Path, options: Options, rows: Sequence[Row], outcome: Outcome, machine: MachineFacts) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    document = {
        "machine": machine.as_dict(),
        "ranks": dict(outcome.facts),
        "parameters": {name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
        "tasks": {task: {**asdict(TASKS[task]), **outcome.sizes.get(task, {})} for task in tasks},
        "algorithms": [_settings(row, options.ranks) for row in rows],
        "summary": [row.as_dict() for row in rows],
        "notes": outcome.notes,
        "errors": outcome.errors,
        "trainings": [asdict(training) for training in outcome.trainings],
    }
    write_json(path, document)


def write_result_file(
    path: Path, options: Options, rows: Sequence[Row], outcome: Outcome, machine: MachineFacts
) -> None:
    verdicts = [f"{row.case} with {row.task}: {row.verdict}" for row in rows if row.verdict]
    figures.write(
        path,
        f"Convergence on {options.ranks} ranks, {options.seeds} seeds",
        figures.convergence_figures(
            outcome.trainings,
            {(row.task, row.case): row.baseline for row in rows},
            figures.case_of(options.ranks, options.device, options.sharing),
        ),
        machine=machine,
        ranks=outcome.facts,
        parameters={**asdict(options), "settings": [_settings(row, options.ranks) for row in rows]},
        notes=[*verdicts, *outcome.notes, *outcome.errors],
    )


def _settings(row: Row, ranks: int) -> dict[str, object]:
    case = CASES[row.case]
    return {
        "task": row.task,
        "name": row.case,
        "algorithm": case.algorithm,
        "options": dict(case.options),
        "optimizer": optimizer_of(row.task, row.case),
        "learning_rate": learning_rate_of(row.task, row.case, ranks),
        "baseline": baseline_of(row.task, row.case),
    }
