"""What is printed and written of a comparison."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence

from bagua.net.bench.api import MISSING, Column, Figure, Label, Turns, figures, render_rows
from measure.convergence.catalogue import (
    CASES,
    LOSS_LIMIT_PERCENT,
    TASKS,
    baseline_of,
    learning_rate_of,
    optimizer_of,
)
from measure.convergence.statistics import (
    Difference,
    Row,
    Spread,
    TrainingResult,
    faults_of,
    mixed_trainings,
    reached,
    rows_of,
)
from measure.report import Report, ranks_text, sharing_notes
from measure.results import case_of, name_of


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
    Column("sent", "kB/step", lambda row: f"{row.bytes_per_step / 1e3:.4g}"),
    Column("same loss", "steps", lambda row: MISSING if row.reached is None else f"{row.reached.steps:.0f}"),
    Column("same loss", "MB sent", lambda row: MISSING if row.reached is None else f"{row.reached.sent / 1e6:.3g}"),
    Column("speed", "steps/s", lambda row: f"{row.steps_per_second:.0f}"),
    Column("verdict", "", lambda row: row.verdict, left=True),
)


def report_of(
    trainings: Sequence[TrainingResult],
    sizes: Mapping[str, Mapping[str, int]],
    given: argparse.Namespace,
    facts: Mapping[str, object],
    turns: Turns[TrainingResult],
    *,
    colour: bool = False,
) -> Report:
    """`sizes`: of each task's splits."""
    mixed = mixed_trainings(trainings)
    rows = [] if mixed else rows_of(trainings)
    sources = {one.task: one.source for one in trainings}
    lines = []
    for task, size in sizes.items():
        steps = next((one.steps for one in trainings if one.task == task), 0)
        lines.append(
            f"{task}: {size['train_samples']} samples to train with, {size['test_samples']} to test,"
            f" {size['parameters']} parameters, {steps} steps of {TASKS[task].batch_size} samples; {sources.get(task)}"
        )
    if any(row.baseline for row in rows):
        lines.append(
            "to baseline: of the same seed's gradient all-reduce with the same optimizer, mean over the seeds ± its"
            " standard error; above 0 is more loss, more accuracy"
        )
    lines.append(
        "sent: by a rank, headers not counted; same loss: when the test loss is first at most"
        f" {LOSS_LIMIT_PERCENT:g} % above the baseline's final one, in mean over the seeds"
    )
    if any(row.spread for row in rows):
        lines.append("apart: a replica's largest distance from the mean of all, over its length; evaluated is the mean")
    labels = case_of(given.ranks, given.device, given.sharing)
    return Report(
        title=f"Convergence on {given.ranks} ranks, {given.seeds} seeds",
        heading=ranks_text(given, facts),
        table=render_rows(
            rows,
            COLUMNS,
            begins_block=lambda before, row: before.task != row.task,
            is_loud=lambda row: row.falls_short,
            colour=colour,
        ),
        figures=[figure for row in rows for figure in figures_of(row, trainings, labels)],
        lines=lines,
        notes=[
            *(f"{row.case} with {row.task}: {row.verdict}" for row in rows if row.falls_short),
            *sharing_notes(given),
            *turns.notes,
        ],
        errors=[*mixed, *turns.errors, *faults_of(trainings)],
        facts=facts,
        parameters={"data": sources, "settings": [_settings(row, given.ranks) for row in rows]},
        rows=rows,
        samples=trainings,
    )


def figures_of(row: Row, trainings: Sequence[TrainingResult], case: Mapping[str, Label]) -> list[Figure]:
    """Repetitions are seeds; differences from the baseline are taken within a seed."""
    mine = {one.seed: one for one in trainings if (one.task, one.case) == (row.task, row.case)}
    other = {one.seed: one for one in trainings if (one.task, one.case) == (row.task, row.baseline)}
    pairs = [(mine[seed], other[seed]) for seed in mine if seed in other]
    labels = {"model": row.task, "algorithm": name_of(row.case), **case}
    values: dict[tuple[str, str], Sequence[float | None]] = {
        ("accuracy", "%"): [None if one.accuracy is None else one.accuracy * 100 for one in mine.values()],
        ("train_loss", ""): [one.train_loss for one in mine.values()],
        ("loss", ""): [one.test_loss for one in mine.values()],
        ("loss_difference", "%"): [(one.test_loss / base.test_loss - 1) * 100 for one, base in pairs],
        ("sent", "kB/step"): [one.curve_bytes[-1] / one.steps / 1e3 for one in mine.values()],
    }
    if row.reached is not None:
        own = pairs or [(one, one) for one in mine.values()]
        found = [reached(one, base.test_loss * (1 + LOSS_LIMIT_PERCENT / 100)) for one, base in own]
        values["steps_to_loss", "steps"] = [None if one is None else one.steps for one in found]
    measured = figures(labels, values)
    for point, step in enumerate(next(iter(mine.values())).curve_steps):
        curve = {
            ("loss", ""): [one.curve_loss[point] for one in mine.values()],
            ("sent", "MB"): [one.curve_bytes[point] / 1e6 for one in mine.values()],
        }
        measured += figures({**labels, "step": step}, curve)
    return measured


def _settings(row: Row, ranks: int) -> dict[str, object]:
    case = CASES[row.case]
    return {
        "task": row.task,
        "name": row.case,
        "algorithm": case.algorithm,
        "options": {**case.options, **case.qadam},
        "optimizer": optimizer_of(row.task, row.case),
        "learning_rate": learning_rate_of(row.task, row.case, ranks),
        "baseline": baseline_of(row.task, row.case),
        "verdict": row.verdict,
    }
