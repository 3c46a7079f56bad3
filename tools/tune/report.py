"""The real cases as a table, and everything as a result file."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import figures as train_figures
import torch

from bagua.net.bench.figures import figures
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.result_file import Figure, Label
from bagua.tuning.setting import Setting
from tune.recorded_case import RecordedCase
from tune.simulate import CLOSE, WORSE, Trial


def real_ratios(case: RecordedCase) -> dict[str, float]:
    """Of the choice in the comparison at the end: its steps to those of the best and of the default, medians over the
    repetitions."""
    pairs = case.document["pairs"]
    return {
        other: statistics.median(a / b for a, b in zip(pairs["chosen"], pairs[other], strict=True))
        for other in ("best", "default")
    }


def real_table(cases: Sequence[RecordedCase]) -> str:
    lines = []
    for case in cases:
        ratios, best = real_ratios(case), Setting.from_json(case.document["best"])
        tuned = Setting.from_json(case.document["tuned"]["setting"])
        lines.append(
            f"{case}: {tuned}, {1 / ratios['default']:.2f}x the default, step {ratios['best']:.3f} of that of {best};"
            f" {case.document['tuned']['steps']} steps"
        )
    close = sum(real_ratios(case)["best"] <= 1 + CLOSE for case in cases)
    worse = sum(real_ratios(case)["default"] > 1 + WORSE for case in cases)
    lines.append(f"within 5 % of the best: {close} of {len(cases)}; slower than the default by 2 %: {worse}")
    return "\n".join(lines)


def write(path: Path, cases: Sequence[RecordedCase], trials: Sequence[Trial], parameters: Mapping[str, object]) -> None:
    found: list[Figure] = []
    models = len({case.document["model"] for case in cases})
    ranks = cases[0].document["ranks"]
    for case in cases:
        labels = _labels(case)
        for setting in case.settings:
            steps = [turn["step_s"] for one, turn in case.document["turns"] if Setting.from_json(one) == setting]
            exposed = [turn["exposed_s"] for one, turn in case.document["turns"] if Setting.from_json(one) == setting]
            where = {**labels, "setting": str(setting)}
            found += figures(where, {("step_time", "ms"): _ms(steps), ("exposed_time", "ms"): _ms(exposed)})
        tuned = Setting.from_json(case.document["tuned"]["setting"])
        pairs = case.document["pairs"]
        for other in ("best", "default"):
            ratios = [a / b for a, b in zip(pairs[other], pairs["chosen"], strict=True)]
            where = {**labels, "setting": str(tuned), "compared_with": other}
            found += figures(where, {("tuned_speedup", "x"): ratios})
        found += figures(labels, {("tuning", "steps"): [case.document["tuned"]["steps"]]})
    for method in dict.fromkeys(trial.method for trial in trials):
        mine = [trial for trial in trials if trial.method == method]
        close = 100 * sum(trial.regret <= CLOSE for trial in mine) / len(mine)
        worse = 100 * sum(trial.loss > WORSE for trial in mine) / len(mine)
        found += figures(
            {"method": method, "simulated": len(mine)},
            {
                ("within_5_percent_of_best", "%"): [close],
                ("slower_than_default", "%"): [worse],
                ("over_best", "%"): [100 * trial.regret for trial in mine],
                ("search", "steps"): [trial.steps for trial in mine],
            },
        )
    train_figures.write(
        path,
        f"Tuning while training, compared with all settings: {models} models on {ranks} ranks in emulated networks",
        [_rounded(one) for one in found],
        machine=describe_machine(),
        ranks={"torch": torch.__version__, "device": ", ".join(sorted({case.document["device"] for case in cases}))},
        parameters=parameters,
    )


def _rounded(one: Figure) -> Figure:
    values = [None if value is None else round(value, 2) for value in (one.median, one.low, one.high)]
    assert values[0] is not None
    return replace(one, median=values[0], low=values[1], high=values[2])


def _labels(case: RecordedCase) -> dict[str, Label]:
    document: Mapping[str, Any] = case.document
    return {
        "model": document["model"],
        "device": document["device"],
        "rate_gbps": document["rate_gbit"],
        "delay_ms": document["delay_ms"],
        "ranks": document["ranks"],
    }


def _ms(seconds: Sequence[float | None]) -> list[float | None]:
    return [None if one is None or not math.isfinite(one) else 1e3 * one for one in seconds]
