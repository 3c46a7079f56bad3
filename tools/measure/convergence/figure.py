"""--plot: above, the test loss of every algorithm while it trains; below, its difference from the baseline."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.convergence.catalogue import CASES, LOSS_LIMIT_PERCENT, TASKS, baseline_of
from measure.convergence.statistics import Difference, TrainingResult, relative_difference_of

# Okabe and Ito's colours, which people with colour-blindness tell apart; marker and dash do so in grey.
_STYLES: tuple[tuple[str, str, Any], ...] = (
    ("#000000", "o", "-"),
    ("#0072B2", "s", "--"),
    ("#D55E00", "^", "-."),
    ("#009E73", "D", ":"),
    ("#CC79A7", "v", (0, (5, 1, 1, 1, 1, 1))),
    ("#E69F00", "P", (0, (3, 2))),
    ("#7F7F7F", "o", (0, (6, 2))),
    ("#56B4E9", "X", (0, (1, 2))),
)
_SECOND_HALF = 0.5


def style_of(case: str) -> tuple[str, str, Any]:
    """The same in every figure, whatever else is in it."""
    return _STYLES[list(CASES).index(case) % len(_STYLES)]


def curves(trainings: Sequence[TrainingResult], task: str, case: str) -> dict[int, TrainingResult]:
    return {one.seed: one for one in trainings if (one.task, one.case) == (task, case)}


def differences(trainings: Sequence[TrainingResult], task: str, case: str) -> list[Difference]:
    """At each point of the curve, from the baseline of the same seed, in per cent of its mean. Empty without one."""
    baseline = baseline_of(task, case)
    if baseline is None:
        return []
    ours, theirs = curves(trainings, task, case), curves(trainings, task, baseline)
    shared = [seed for seed in ours if seed in theirs]
    if not shared:
        return []
    points = range(len(ours[shared[0]].curve_loss))
    return [
        relative_difference_of(
            [ours[seed].curve_loss[point] for seed in shared], [theirs[seed].curve_loss[point] for seed in shared]
        )
        for point in points
    ]


def write_figure(path: Path, trainings: Sequence[TrainingResult], title: str, caption: str) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    tasks = [task for task in TASKS if any(one.task == task for one in trainings)]
    settings = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",
    }
    with pyplot.rc_context(settings):
        width = 4.2 * len(tasks) + 2.6
        figure, panels = pyplot.subplots(
            2, len(tasks), figsize=(width, 7.0), squeeze=False, layout="constrained", height_ratios=(3, 2)
        )
        for column, task in enumerate(tasks):
            _draw_losses(panels[0][column], trainings, task)
            _draw_differences(panels[1][column], trainings, task)
        panels[0][0].set_ylabel("test loss")
        panels[1][0].set_ylabel("to gradient all-reduce (%)")
        handles: dict[str, Any] = {}
        for axes in panels[0]:
            handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        names = [name for name in CASES if name in handles]
        figure.legend([handles[name] for name in names], names, loc="outside right upper")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.supxlabel(caption, fontsize=7, color="0.35", x=0.01, ha="left")
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def _draw_losses(axes: Any, trainings: Sequence[TrainingResult], task: str) -> None:
    for case in CASES:
        found = list(curves(trainings, task, case).values())
        if not found:
            continue
        colour, marker, dash = style_of(case)
        epochs = found[0].curve_epochs
        points = list(zip(*(one.curve_loss for one in found), strict=True))
        axes.fill_between(epochs, [min(p) for p in points], [max(p) for p in points], color=colour, alpha=0.12, lw=0)
        means = [statistics.fmean(point) for point in points]
        axes.plot(epochs, means, color=colour, marker=marker, linestyle=dash, lw=1.2, markersize=3, label=case)
    axes.set_yscale("log")
    ticker = importlib.import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_title(f"{task}: loss (mean, least and most of the seeds)", loc="left")
    _finish(axes)


def _draw_differences(axes: Any, trainings: Sequence[TrainingResult], task: str) -> None:
    axes.axhspan(-LOSS_LIMIT_PERCENT, LOSS_LIMIT_PERCENT, color="0.92", lw=0)
    axes.axhline(0, color="0.5", lw=0.8)
    late: list[float] = [LOSS_LIMIT_PERCENT]
    for case in CASES:
        gaps = differences(trainings, task, case)
        if not gaps:
            continue
        colour, marker, dash = style_of(case)
        epochs = next(iter(curves(trainings, task, case).values())).curve_epochs
        means = [gap.mean for gap in gaps]
        errors = [gap.error or 0.0 for gap in gaps]
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(epochs, low, high, color=colour, alpha=0.12, lw=0)
        axes.plot(epochs, means, color=colour, marker=marker, linestyle=dash, lw=1.2, markersize=3)
        late += [abs(m) + e for m, e in list(zip(means, errors, strict=True))[int(len(means) * _SECOND_HALF) :]]
    # What counts is the end: the first steps may leave the picture.
    top = min(max(late) * 1.15, 50.0)
    axes.set_ylim(-top, top)
    axes.set_title("difference, mean ± standard error (grey: limit)", loc="left")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.set_xlabel("epoch")
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
