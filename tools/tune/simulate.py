"""Each method on drawn turns of recorded cases, many times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tune.methods import METHODS, draw_of
from tune.recorded_case import RecordedCase

CLOSE = 0.05
WORSE = 0.02


@dataclass(frozen=True)
class Trial:
    """
    Attributes:
        regret: how much longer the chosen step is than the best one's, as a part of that.
        loss: than the default's.
        steps: that the search took.
    """

    method: str
    case: RecordedCase
    regret: float
    loss: float
    steps: int


def simulate(
    cases: Sequence[RecordedCase], seeds: int, pauses: float, noise: float, methods: Sequence[str]
) -> list[Trial]:
    trials = []
    for method in methods:
        for case in cases:
            for seed in range(seeds):
                found = METHODS[method](case, draw_of(case, seed, pauses, noise), seed)
                trials.append(Trial(method, case, case.regret(found.setting), case.loss(found.setting), found.steps))
    return trials


def table(trials: Sequence[Trial]) -> str:
    rows = [
        ("method", "trials", "within 5 %", "median over best", "worst over best", "slower by 2 %", "worst", "steps")
    ]
    for method in dict.fromkeys(trial.method for trial in trials):
        mine = [trial for trial in trials if trial.method == method]
        regrets = [trial.regret for trial in mine]
        steps = [trial.steps for trial in mine]
        rows.append(
            (
                method,
                str(len(mine)),
                f"{100 * sum(regret <= CLOSE for regret in regrets) / len(mine):.0f} %",
                f"{100 * statistics.median(regrets):.1f} %",
                f"{100 * max(regrets):.0f} %",
                str(sum(trial.loss > WORSE for trial in mine)),
                f"{100 * max(trial.loss for trial in mine):.0f} %",
                f"{statistics.median(steps):.0f} ({max(steps)})",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
