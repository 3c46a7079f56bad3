"""Step times and losses of all runs, side by side."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.report import hand_tuned_names, has_envelope
from bagua.net.bench.nccl_ab.results import BEST_TUNED_NAME
from ddp_comparison.training_run import Training


def write_figure(
    path: Path,
    trainings: Sequence[Training],
    backends: Sequence[Backend],
    best: str | None,
    title: str,
    caption: str,
) -> None:
    """With many hand-tuned settings the best of them is a line like NCCL's default and ours; the others are grey."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    # Okabe and Ito's colours; dashes tell them apart in grey.
    styles = [("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."), ("#CC79A7", ":")]
    names = list(dict.fromkeys(training.backend for training in trainings))
    tuned = hand_tuned_names(backends) if has_envelope(backends) else []
    faint = [name for name in names if name in tuned and name != best]
    coloured = [name for name in names if name not in faint]
    settings = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with pyplot.rc_context(settings):
        figure, (times, losses) = pyplot.subplots(1, 2, figsize=(9.2, 3.9), layout="constrained")
        for name in sorted(names, key=lambda name: name in coloured):
            colour, dash, width = "0.75", "-", 0.7
            if name in coloured:
                (colour, dash), width = styles[coloured.index(name) % len(styles)], 1.3
            for number, training in enumerate(t for t in trainings if t.backend == name):
                label = _label(name, best, faint) if number == 0 else None
                milliseconds = [seconds * 1e3 for seconds in training.step_seconds]
                times.plot(range(1, len(milliseconds) + 1), milliseconds, dash, color=colour, lw=width, label=label)
                losses.plot(range(1, len(training.losses) + 1), training.losses, dash, color=colour, lw=width)
        steady = [seconds * 1e3 for training in trainings for seconds in training.steady_step_seconds]
        times.set_ylim(0, max(steady) * 1.25)
        times.set_ylabel("time of a step (ms, slowest rank)")
        times.set_title("Step time, every round (lower is better)", loc="left")
        losses.set_ylabel("training loss (mean over ranks)")
        losses.set_title("Loss: the lines have to coincide", loc="left")
        for axes in (times, losses):
            axes.set_xlabel("step")
            axes.grid(True, color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
        losses.legend(*times.get_legend_handles_labels(), loc="upper right")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        figure.supxlabel(caption, fontsize=7, color="0.35", x=0.01, ha="left")
        figure.savefig(path, dpi=200)
        pyplot.close(figure)


def _label(name: str, best: str | None, faint: Sequence[str]) -> str | None:
    if name in faint:
        return "other hand-tuned settings" if name == faint[0] else None
    return f"{BEST_TUNED_NAME}: {name}" if name == best and faint else name
