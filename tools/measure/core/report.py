"""What is printed and written of a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bagua.net.bench.table import MISSING, Column, render_rows
from measure.core.catalogue import ALL_REDUCE, REFERENCE, Promise
from measure.core.compression_code import compression_notes
from measure.core.run import CoreRun, size_of
from measure.core.step_statistics import Row, TurnResult, faults_of, own_spread, promise_of, rows_of
from measure.report import Report, format_ms, number, ranks_text, sharing_notes
from measure.results import case_of, step_figures

# Said of those that do not train as DDP does.
_PROMISES = {
    Promise.EQUAL: "another training than DDP's, in which all ranks keep the same parameters",
    Promise.OWN: "another training than DDP's, in which every rank has parameters of its own",
}


def _short(algorithm: str) -> str:
    return "DDP" if algorithm == REFERENCE else algorithm


def _replicas(row: Row) -> str:
    if row.replicas_agree:
        return "agree"
    return "own" if promise_of(row.algorithm) is Promise.OWN else "DIFFER"


def columns(given: argparse.Namespace) -> tuple[Column[Row], ...]:
    def samples_per_second(row: Row) -> float:
        batch_size: int = size_of(given, row.model)["batch_size"]
        return given.ranks * batch_size / (row.step_ms * 1e-3)

    def from_ddp(row: Row) -> str:
        """Only of those that promise to be there."""
        return number(row.largest_difference, ".2g") if promise_of(row.algorithm) is Promise.AS_DDP else MISSING

    return (
        Column("model", "", lambda row: row.model, left=True),
        Column("algorithm", "", lambda row: row.algorithm, left=True),
        Column("step", "ms", lambda row: format_ms(row.step_ms)),
        Column("p10..p90", "ms", lambda row: f"{format_ms(row.step_ms_low)}..{format_ms(row.step_ms_high)}"),
        Column(
            f"over {_short(given.baseline)}",
            "x",
            lambda row: MISSING if row.speed_up is None else f"{row.speed_up.median:.3f}",
        ),
        Column(
            "by round",
            "x",
            lambda row: MISSING if row.speed_up is None else f"{row.speed_up.low:.3f}..{row.speed_up.high:.3f}",
        ),
        Column("samples", "/s", lambda row: f"{samples_per_second(row):.4g}"),
        Column("peak", "MiB", lambda row: number(row.peak_mib, ".0f"), optional=True),
        Column("extra", "B/elem", lambda row: number(row.extra_bytes_per_parameter, "+.1f"), optional=True),
        Column("CPU", "%", lambda row: number(row.busy_percent, ".0f"), optional=True),
        Column("from DDP", "largest", from_ddp, optional=True),
        Column("replicas", "", _replicas),
    )


def report_of(run: CoreRun, given: argparse.Namespace, *, colour: bool = False) -> Report:
    turns = run.results
    rows = rows_of(turns, given.baseline)
    labels = case_of(given.ranks, given.device, given.sharing, rate_gbps=None, delay_ms=0.0)
    if given.network is not None:
        labels["network"] = given.network
    network = f", network {given.network}" if given.network else ", gloo"
    length = f"turns of {given.steps} steps after {given.warmup}"
    return Report(
        title=f"Step time of training: {', '.join(given.model)} on {given.ranks} ranks",
        heading=f"{ranks_text(given, run.facts)}{network}; {length}",
        table=render_rows(
            rows,
            columns(given),
            begins_block=lambda before, row: before.model != row.model,
            is_loud=lambda row: _replicas(row) == "DIFFER",
            colour=colour,
        ),
        figures=step_figures(rows, labels),
        lines=closing_lines(rows, turns, given.baseline),
        notes=[*sharing_notes(given), *compression_notes(run.facts), *run.turns.notes],
        errors=[*run.turns.errors, *faults_of(turns, given.tolerance)],
        facts=run.facts,
        parameters={"models": {model: size_of(given, model) for model in given.model}},
        rows=rows,
        samples=turns,
    )


def closing_lines(rows: Sequence[Row], turns: Sequence[TurnResult], baseline: str) -> list[str]:
    lines = []
    if any(row.speed_up is not None for row in rows):
        lines.append(
            f"over {_short(baseline)}: step time of {baseline} over the algorithm's, within a round; above 1 is faster"
        )
    if any(row.extra_bytes_per_parameter is not None for row in rows):
        lines.append(f"extra: peak of the measured steps beyond {ALL_REDUCE}'s, for each element of the parameters")
    if any(row.machine_busy is not None for row in rows):
        lines.append("CPU: of this machine's CPUs, by everything on it; near 100 they are the limit")
    for promise, meaning in _PROMISES.items():
        promising = [name for name in dict.fromkeys(row.algorithm for row in rows) if promise_of(name) is promise]
        if promising:
            lines.append(f"{meaning}: {', '.join(promising)}")
    lines += [
        f"{row.algorithm}, {row.model}: parameters were averaged once in {row.steps_per_averaging:.1f} steps"
        for row in rows
        if row.steps_per_averaging is not None
    ]
    for model in dict.fromkeys(row.model for row in rows):
        compared = [
            f"{row.algorithm} at most {row.largest_difference:.2g} apart ({row.relative_difference:.2g} of the way)"
            for row in rows
            if row.model == model and row.algorithm != REFERENCE and promise_of(row.algorithm) is Promise.AS_DDP
            if row.largest_difference is not None
        ]
        if compared:
            lines.append(f"final parameters compared with those of {REFERENCE}, {model}: {', '.join(compared)}")
        if spread := own_spread(turns, model):
            lines.append(
                f"rounds of {REFERENCE}, {model}: final parameters differ by {spread:.2g} of the way from the start"
            )
    return lines
