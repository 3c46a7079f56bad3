"""Who wins where, as a picture: delays upwards, rates to the right, the winner and its speed-up in the cell.

matplotlib is imported when a picture is drawn: measuring needs no third-party package.
"""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.core.catalogue import ALGORITHMS, ALL_REDUCE

from bagua.net.bench.plot import check_plot_path

from .report import Grid
from .results import winner_of

_PANELS = {True: "Replicas stay equal", False: "All algorithms"}
# Speed-ups from 1 to this have a colour of their own; more is as dark.
_DARKEST = 16
_COLOURS = "YlGnBu"
_NOT_MEASURED = "0.9"
# Dark colours need light text.
_LIGHT_TEXT_FROM = 0.6


def write_plot(path: Path, grid: Grid, models: Sequence[str], *, title: str, caption: str) -> None:
    check_plot_path(path)
    plt = importlib.import_module("matplotlib.pyplot")
    width, height = 1.25 * len(grid.distinct_rates) + 1.0, 0.8 * len(grid.delays) + 1.1
    with plt.rc_context({"font.size": 8, "axes.titlesize": 9, "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure, axes = plt.subplots(
            len(models),
            len(_PANELS),
            figsize=(width * len(_PANELS), height * len(models) + 0.6),
            squeeze=False,
            layout="constrained",
        )
        for row, model in enumerate(models):
            for column, (replicas_equal, name) in enumerate(_PANELS.items()):
                axis = axes[row][column]
                image = _draw(axis, grid, model, replicas_equal)
                axis.set_title(f"{model}: {name.lower()}" if len(models) > 1 else name, loc="left")
        ticks = range(round(math.log2(_DARKEST)) + 1)
        figure.colorbar(
            image, ax=axes, shrink=0.8, label="speed-up over gradient all-reduce", ticks=list(ticks), extend="max"
        ).ax.set_yticklabels([f"{1 << tick}x" for tick in ticks])
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        foot = "\n".join(textwrap.wrap(caption, int(40 * width)))
        figure.supxlabel(foot, fontsize=6, color="0.35", x=0.01, ha="left")
        figure.savefig(path, dpi=200)
        plt.close(figure)


def shade(speed_up: float) -> float:
    """0 for no speed-up to 4 for sixteen times and more: equal factors are equal steps."""
    return min(math.log2(max(speed_up, 1.0)), math.log2(_DARKEST))


def label(algorithm: str, speed_up: float) -> str:
    """Two or three short lines."""
    if algorithm == ALL_REDUCE:
        return "all-reduce"
    return "\n".join([*textwrap.wrap(algorithm.replace("-", " "), 14), f"{speed_up:.2f}x"])


def tick_labels(grid: Grid) -> list[str]:
    """Of the columns. Rates that the machine does not move at any delay are one, named by the lowest."""
    labels = [f"{rate:g}" for rate in grid.distinct_rates]
    if len(labels) < len(grid.rates):
        labels[-1] += " and more"
    return labels


def _draw(axis: Any, grid: Grid, model: str, replicas_equal: bool) -> Any:
    columns = grid.distinct_rates
    shades = [[math.nan] * len(columns) for _ in grid.delays]
    for y, delay in enumerate(grid.delays):
        for rates in grid.spans(delay):
            rate, first, width = rates[0], columns.index(rates[0]), len(rates)
            x = first + (width - 1) / 2
            result = grid.result(delay, rate)
            winner = winner_of(result.rows_of(model), replicas_equal=replicas_equal) if result else None
            if winner is None:
                axis.text(x, y, "not measured", ha="center", va="center", fontsize=6, color="0.4")
                continue
            shades[y][first : first + width] = [shade(winner.speed_up)] * width
            colour = "white" if shades[y][first] / math.log2(_DARKEST) > _LIGHT_TEXT_FROM else "black"
            text = label(winner.algorithm, winner.speed_up)
            if width > 1:
                text = f"{rate:g} and more:\n{text}"
            if not ALGORITHMS[winner.algorithm].waits:
                second = winner_of(result.rows_of(model), replicas_equal=replicas_equal, waiting=True)
                text += f"\nthen {label(second.algorithm, second.speed_up)}" if second else ""
            axis.text(x, y, text, ha="center", va="center", fontsize=6.5, color=colour)
            if not grid.is_limited(delay, rate):
                # Of a machine that is slower than the network.
                axis.add_patch(_framed(first, y, width))
    axis.set_facecolor(_NOT_MEASURED)
    image = axis.imshow(shades, cmap=_COLOURS, vmin=0, vmax=math.log2(_DARKEST), origin="lower", aspect="auto")
    axis.set_xticks(range(len(columns)), tick_labels(grid))
    axis.set_yticks(range(len(grid.delays)), [f"{delay:g}" for delay in grid.delays])
    axis.set_xlabel("rate (Gb/s)")
    axis.set_ylabel("delay, one way (ms)")
    return image


def _framed(x: int, y: int, width: int) -> Any:
    patches = importlib.import_module("matplotlib.patches")
    return patches.Rectangle(
        (x - 0.46, y - 0.46), width - 0.08, 0.92, fill=False, edgecolor="0.5", linestyle="--", linewidth=0.8
    )
