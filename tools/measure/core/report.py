"""What is printed and written of a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from bagua.net.bench.api import MISSING, Column, render_rows
from measure.core.catalogue import ALL_REDUCE, REFERENCE, Promise
from measure.core.compression_code import compression_notes
from measure.core.run import CoreRun, size_of
from measure.core.step_statistics import Row, TurnResult, faults_of, own_spread, promise_of, rows_of
from measure.ranks.network import Network
from measure.report import Report, format_ms, number, ranks_text, sharing_notes
from measure.results import case_of, step_figures

# Said of those that do not train as DDP does.
_PROMISES = {
    Promise.EQUAL: "another training than DDP's, in which all ranks keep the same parameters",
    Promise.OWN: "another training than DDP's, in which every rank has parameters of its own",
}

# Who changes the training for less gains less than machines differ by.
LEAST_SPEED_UP = 1.05


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


def report_of(
    runs: Sequence[tuple[Network, CoreRun]],
    given: argparse.Namespace,
    notes: Sequence[str] = (),
    errors: Sequence[str] = (),
    *,
    colour: bool = False,
) -> Report:
    """`runs`: of each network, in which there may be no turn."""
    several = len(given.networks) > 1
    measured: list[Row] = []
    report = Report(
        title=f"Step time of training: {', '.join(given.model)} on {given.ranks} ranks",
        heading="",
        table="",
        figures=[],
        notes=[*sharing_notes(given), *notes],
        errors=list(errors),
        parameters={"models": {model: size_of(given, model) for model in given.model}},
    )
    for network, run in runs:
        if run.facts and not report.facts:
            report.facts = run.facts
            report.notes += compression_notes(run.facts)
        prefix = f"{network.name}: " if several else ""
        turns = run.results
        rows = rows_of(turns, given.baseline)
        labels = case_of(given.ranks, given.device, given.sharing, **network.labels())
        if given.network is not None:
            labels["network"] = given.network
        title = f"{network.name}\n" if network.is_emulated else ""
        table = render_rows(
            rows,
            columns(given),
            begins_block=lambda before, row: before.model != row.model,
            is_loud=lambda row: _replicas(row) == "DIFFER",
            colour=colour,
        )
        report.table += f"{title}{table}\n" if rows and several else f"{title}{table}" if rows else ""
        report.figures += step_figures(rows, labels)
        report.lines += [f"{prefix}{line}" for line in measured_lines(rows, turns)]
        report.lines += [f"{prefix}{fastest_line(model, rows)}" for model in given.model if several]
        report.notes += [f"{prefix}{note}" for note in run.turns.notes]
        report.errors += [f"{prefix}{one}" for one in (*run.turns.errors, *faults_of(turns, given.tolerance))]
        measured += rows
        report.rows += [{"network": network.name, **asdict(row)} for row in rows]
        report.samples += [{"network": network.name, **asdict(turn)} for turn in turns]
    network_text = f", network {given.network}" if given.network else ", gloo"
    length = f"turns of {given.steps} steps after {given.warmup}"
    report.heading = f"{ranks_text(given, report.facts)}{network_text}; {length}"
    report.lines[:0] = legend(measured, given.baseline)
    return report


def fastest_line(model: str, rows: Sequence[Row]) -> str:
    """The fastest algorithm with a model: of those that keep replicas equal, and of all."""
    kinds = {"with equal replicas": (Promise.EQUAL,), "of all": (Promise.EQUAL, Promise.OWN)}
    found = []
    for kind, promises in kinds.items():
        best = fastest([row for row in rows if row.model == model and promise_of(row.algorithm) in promises])
        found.append(f"{kind} {'gradient all-reduce' if best is None else best}")
    return f"the fastest, {model}: {', '.join(found)}"


def fastest(rows: Sequence[Row]) -> str | None:
    """Of those that were faster than the baseline in every round, and by 5 % in the median, the fastest."""
    gains = {
        row.algorithm: row.speed_up.median
        for row in rows
        if row.speed_up is not None and row.speed_up.low > 1 and row.speed_up.median >= LEAST_SPEED_UP
    }
    best = max(gains, key=lambda name: gains[name], default=None)
    return None if best is None else f"{best} {gains[best]:.2f}x"


def legend(rows: Sequence[Row], baseline: str) -> list[str]:
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
    return lines


def measured_lines(rows: Sequence[Row], turns: Sequence[TurnResult]) -> list[str]:
    lines = [
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
