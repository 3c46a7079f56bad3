"""--plot: the test loss of every algorithm over the bytes that a rank has sent, one panel per task."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure.convergence.catalogue import CASES, TASKS
from measure.runner import Row

# Of algorithms: Okabe and Ito's colours, which people with colour-blindness tell apart; markers do so in grey.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_COLOURS += ("#7F7F7F", "#A6761D", "#5E4FA2", "#882255")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
# Of variants of an algorithm, such as its codecs.
_DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 1, 2)))
_MARKERS_OF_A_CURVE = 4


def style_of(case: str) -> tuple[str, str, Any]:
    """Colour, marker and dash: the same in every figure, whatever else is in it."""
    families = list(dict.fromkeys(_family_of(name) for name in CASES))
    family = families.index(_family_of(case))
    variants = [name for name in CASES if _family_of(name) == _family_of(case)]
    dash = _DASHES[variants.index(case) % len(_DASHES)]
    return _COLOURS[family % len(_COLOURS)], _MARKERS[(family + family // len(_COLOURS)) % len(_MARKERS)], dash


def _family_of(case: str) -> str:
    return case.partition("-")[0]


def write_figure(path: Path, rows: Sequence[Row], title: str, caption: str) -> None:
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    tasks = [task for task in TASKS if any(row.case.task == task for row in rows)]
    settings = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",
    }
    with pyplot.rc_context(settings):
        width = max(5.0, 3.6 * len(tasks)) + 2.8
        figure, panels = pyplot.subplots(1, len(tasks), figsize=(width, 5.2), squeeze=False, layout="constrained")
        handles: dict[str, Any] = {}
        for axes, task in zip(panels[0], tasks, strict=True):
            _draw(axes, {row.variant: row for row in rows if row.case.task == task}, task)
            handles.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        panels[0][0].set_ylabel("test loss")
        names = [name for name in CASES if name in handles]
        figure.legend([handles[name] for name in names], names, loc="outside right upper")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.supxlabel(caption, fontsize=7, color="0.35", x=0.01, ha="left")
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def _draw(axes: Any, rows: Mapping[str, Row], task: str) -> None:
    """Without the start, where nothing was sent."""
    for place, case in enumerate(CASES):
        if case not in rows:
            continue
        curves = rows[case].values("curve_bytes"), rows[case].values("curve_loss")
        colour, marker, dash = style_of(case)
        sent = [statistics.fmean(point) / 1e6 for point in zip(*(one[1:] for one in curves[0]), strict=True)]
        losses = list(zip(*(one[1:] for one in curves[1]), strict=True))
        axes.fill_between(sent, [min(p) for p in losses], [max(p) for p in losses], color=colour, alpha=0.1, lw=0)
        means = [statistics.fmean(point) for point in losses]
        # Curves that lie on each other have their markers in different places.
        every = max(1, len(means) // _MARKERS_OF_A_CURVE)
        places, style = (place % every, every), {"color": colour, "marker": marker, "linestyle": dash, "lw": 1.2}
        axes.plot(sent, means, markersize=4, markevery=places, label=case, **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticker = importlib.import_module("matplotlib.ticker")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_locator(ticker.MaxNLocator(8))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_title(f"{task} (mean of the seeds; shaded: all)", loc="left")
    axes.set_xlabel("MB sent by a rank")
    axes.grid(True, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
