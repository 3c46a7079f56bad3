"""What is printed and what is written of a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import figures
from device_option import device_text

from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.table import BOLD, DIM, LOUD, MISSING, RESET
from core_comparison.catalogue import ALL_REDUCE, REFERENCE, Promise
from core_comparison.comparison_run import Outcome
from core_comparison.compression_code import compression_notes
from core_comparison.options import Options
from core_comparison.step_statistics import Row, own_spread, promise_of


@dataclass(frozen=True)
class Column:
    title: str
    unit: str
    cell: Callable[[Row], str]
    left: bool = False
    optional: bool = False  # left out when no row has a value


# Said of those that do not train as DDP does.
_PROMISES = {
    Promise.EQUAL: "another training than DDP's, in which all ranks keep the same parameters",
    Promise.OWN: "another training than DDP's, in which every rank has parameters of its own",
}


def _or_missing(value: float | None, style: str) -> str:
    return MISSING if value is None else format(value, style)


def format_ms(value: float) -> str:
    """Three to four significant digits: 0.938, 9.38, 93.8, 938."""
    if value < 1:
        return f"{value:.3f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _short(algorithm: str) -> str:
    return "DDP" if algorithm == REFERENCE else algorithm


def samples_per_second(row: Row, options: Options) -> float:
    """Of all ranks together."""
    return options.ranks * options.batch_size_of(row.model) / (row.step_ms * 1e-3)


def _from_ddp(row: Row) -> str:
    """Only of those that promise to be there."""
    return _or_missing(row.largest_difference, ".2g") if promise_of(row.algorithm) is Promise.AS_DDP else MISSING


def _replicas(row: Row) -> str:
    if row.replicas_agree:
        return "agree"
    return "own" if _may_differ(row) else "DIFFER"


def _may_differ(row: Row) -> bool:
    return promise_of(row.algorithm) is Promise.OWN


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def columns(options: Options) -> tuple[Column, ...]:
    return (
        Column("model", "", lambda row: row.model, left=True),
        Column("algorithm", "", lambda row: row.algorithm, left=True),
        Column("step", "ms", lambda row: format_ms(row.step_ms)),
        Column("p10..p90", "ms", lambda row: f"{format_ms(row.step_ms_low)}..{format_ms(row.step_ms_high)}"),
        Column(
            f"over {_short(options.baseline)}",
            "x",
            lambda row: MISSING if row.speed_up is None else f"{row.speed_up.median:.3f}",
        ),
        Column(
            "by round",
            "x",
            lambda row: MISSING if row.speed_up is None else f"{row.speed_up.low:.3f}..{row.speed_up.high:.3f}",
        ),
        Column("samples", "/s", lambda row: f"{samples_per_second(row, options):.4g}"),
        Column("peak", "MiB", lambda row: _or_missing(row.peak_mib, ".0f"), optional=True),
        Column("extra", "B/elem", lambda row: _or_missing(row.extra_bytes_per_parameter, "+.1f"), optional=True),
        Column("CPU", "%", lambda row: _or_missing(_percent(row.machine_busy), ".0f"), optional=True),
        Column("from DDP", "largest", _from_ddp, optional=True),
        Column("replicas", "", _replicas),
    )


def render(rows: Sequence[Row], options: Options, *, colour: bool = False) -> str:
    """Two head lines (title, unit), then a line an algorithm; a blank line where the model changes."""
    offered = columns(options)
    cells = {column.title: [column.cell(row) for row in rows] for column in offered}
    shown = [one for one in offered if not one.optional or any(text != MISSING for text in cells[one.title])]
    widths = [max(len(text) for text in (one.title, one.unit, *cells[one.title])) for one in shown]

    def line(texts: Sequence[str]) -> str:
        parts = [
            text.ljust(width) if column.left else text.rjust(width)
            for text, width, column in zip(texts, widths, shown, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = [line([one.title for one in shown]), line([one.unit for one in shown])]
    lines = [f"{BOLD}{head[0]}{RESET}", f"{DIM}{head[1]}{RESET}"] if colour else head
    for number, row in enumerate(rows):
        if number and rows[number - 1].model != row.model:
            lines.append("")
        text = line([cells[one.title][number] for one in shown])
        lines.append(f"{LOUD}{text}{RESET}" if colour and _replicas(row) == "DIFFER" else text)
    return "\n".join(lines)


def threads_each(facts: Mapping[str, Any]) -> str:
    """Of the ranks, as they said when they were ready."""
    threads = facts.get("threads", "?")
    return f"{threads} thread{'' if threads == 1 else 's'} each"


def heading(options: Options, outcome: Outcome) -> str:
    facts = outcome.facts
    device = device_text(facts.get("device", "?"), options.sharing)
    nccl = f", NCCL {facts['nccl']}" if facts.get("nccl") else ""
    network = f"network {options.network}" if options.network else f"gloo, {threads_each(facts)}"
    return (
        f"{options.ranks} ranks on {device}, torch {facts.get('torch', '?')}{nccl}, {network};"
        f" turns of {options.steps} steps after {options.warmup}"
    )


def sharing_notes(options: Options) -> list[str]:
    return [] if options.sharing is None else [options.sharing.note]


def closing_lines(rows: Sequence[Row], options: Options, outcome: Outcome) -> list[str]:
    lines = []
    if any(row.speed_up is not None for row in rows):
        lines.append(
            f"over {_short(options.baseline)}: step time of {options.baseline} over the algorithm's, within a round;"
            " above 1 is faster"
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
            row
            for row in rows
            if row.model == model and row.algorithm != REFERENCE and promise_of(row.algorithm) is Promise.AS_DDP
        ]
        if found := [_difference(row) for row in compared if row.largest_difference is not None]:
            lines.append(f"final parameters compared with those of {REFERENCE}, {model}: {', '.join(found)}")
    spreads = {model: own_spread(outcome.turns, model) for model in dict.fromkeys(row.model for row in rows)}
    lines += [
        f"rounds of {REFERENCE}, {model}: final parameters differ by {spread:.2g} of the way from the start"
        for model, spread in spreads.items()
        if spread
    ]
    lines += [f"note: {note}" for note in (*sharing_notes(options), *compression_notes(outcome.facts), *outcome.notes)]
    return [*lines, *(f"ERROR: {error}" for error in outcome.errors)]


def _difference(row: Row) -> str:
    if not row.largest_difference:
        return f"{row.algorithm} equal"
    return (
        f"{row.algorithm} at most {row.largest_difference:.2g} apart ({row.relative_difference:.2g} of the way from the"
        " start)"
    )


def write_document(path: Path, options: Options, rows: Sequence[Row], outcome: Outcome, machine: MachineFacts) -> None:
    models = {model: _facts_of(model, options, outcome) for model in options.models}
    document = {
        "machine": machine.as_dict(),
        "ranks": dict(outcome.facts),
        "parameters": {
            **{name: value for name, value in asdict(options).items() if not isinstance(value, Path)},
            "models": models,
        },
        "summary": [row.as_dict() for row in rows],
        "own_spread": {model: own_spread(outcome.turns, model) for model in models},
        "notes": outcome.notes,
        "errors": outcome.errors,
        "turns": [asdict(turn) for turn in outcome.turns],
    }
    write_json(path, document)


def write_result_file(
    path: Path, options: Options, rows: Sequence[Row], outcome: Outcome, machine: MachineFacts
) -> None:
    labels = figures.case_of(options.ranks, options.device, options.sharing, rate_gbps=None, delay_ms=0.0)
    if options.network is not None:
        labels["network"] = options.network
    figures.write(
        path,
        f"Step time of training: {', '.join(options.models)} on {options.ranks} ranks",
        figures.step_figures(rows, labels),
        machine=machine,
        ranks=outcome.facts,
        parameters={**asdict(options), "models": {model: options.turn(model) for model in options.models}},
        notes=[*sharing_notes(options), *outcome.notes, *outcome.errors],
    )


def _facts_of(model: str, options: Options, outcome: Outcome) -> dict[str, object]:
    turn = next((turn for turn in outcome.turns if turn.model == model), None)
    counts = {} if turn is None else {"parameters": turn.parameters, "gradients": turn.gradients}
    return {**options.turn(model), **counts}


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """JSON has no infinities; what is no number is written as null."""
    path.write_text(json.dumps(_finite(document), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
