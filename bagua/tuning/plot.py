"""A result of tuning as a picture: a bar for each setting, of which the exposed communication is the dark part.
matplotlib is imported when it is drawn."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

from bagua.tuning.memory import Answer

_SUFFIXES = (".png", ".svg", ".pdf")
_REST, _EXPOSED = "#56B4E9", "#D55E00"  # Okabe and Ito: told apart by people with color blindness, and in grey


class PlotError(RuntimeError):
    """It cannot be drawn."""


def write_plot(path: Path, answer: Answer) -> None:
    """
    Raises:
        PlotError: matplotlib is missing, or the file's suffix is no format.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise PlotError(f"--plot {path} has the suffix {path.suffix!r}; use one of {', '.join(_SUFFIXES)}")
    try:
        importlib.import_module("matplotlib").use("Agg")
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError("--plot needs matplotlib, which is not installed; run: pip install matplotlib") from error
    tried = sorted(answer.tried, key=lambda one: -one.ratio)
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.28 * len(tried)), layout="constrained")
    try:
        names = [f"{'* ' if one.setting == answer.setting else ''}{one.setting}" for one in tried]
        exposed = [0.0 if math.isnan(one.exposed_s) else 1e3 * min(one.exposed_s, one.step_s) for one in tried]
        rest = [1e3 * one.step_s - part for one, part in zip(tried, exposed, strict=True)]
        axes.barh(names, rest, color=_REST, label="rest of the step")
        axes.barh(names, exposed, left=rest, color=_EXPOSED, label="exposed communication")
        axes.set_xlabel("step time (ms); * is what was chosen")
        axes.set_title(f"{answer.fingerprint.model}: {answer.fingerprint.world}", loc="left", fontsize=10)
        axes.legend(loc="lower right", frameon=False, fontsize=8)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)
