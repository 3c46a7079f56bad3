"""Cuts a result file of a measurement tool down to the figures that docs/results keeps.

    PYTHONPATH=tools python -m results.publish out/nccl.json docs/results/NAME.json

Of the hand-tuned settings only the best at each size stays. Title, command, machine and notes stay as the tool wrote
them: what a reader should know is written by hand, in the words of the other files.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from bagua.net.bench.api import Figure, read_result, write_result

_BACKENDS = ("nccl", "nccl_tuned_best", "plugin", "nccl_shared_memory")
_BASELINES = (None, "nccl", "nccl_tuned_best")
_METRICS = ("time", "busbw", "step_time", "speedup", "cpu")
_DECIMALS = {"speedup": 2, "cpu": 2, "step_time": 1}


def compact(figures: tuple[Figure, ...]) -> tuple[Figure, ...]:
    """By collective, size, metric and backend; a figure without a spread does not say how often it was taken."""
    found = [one for one in figures if one.case["backend"] in _BACKENDS and one.metric in _METRICS]
    found = [_rounded(one) for one in found if one.case.get("baseline") in _BASELINES]
    places = list(dict.fromkeys((one.case.get("collective"), one.case.get("size_bytes")) for one in figures))
    return tuple(sorted(found, key=lambda one: (
        places.index((one.case.get("collective"), one.case.get("size_bytes"))), _METRICS.index(one.metric),
        _BACKENDS.index(str(one.case["backend"])), _BASELINES.index(one.case.get("baseline")),
    )))  # fmt: skip


def _rounded(one: Figure) -> Figure:
    """To three digits; whole numbers keep all of theirs."""

    def short(value: float) -> float:
        if one.metric in _DECIMALS and value >= 0.1:
            return round(value, _DECIMALS[one.metric])
        return round(value) if value >= 100 else float(f"{value:.3g}")

    if one.low is None or one.high is None:
        return replace(one, median=short(one.median), repetitions=None)
    return replace(one, median=short(one.median), low=short(one.low), high=short(one.high))


if __name__ == "__main__":
    raw = read_result(Path(sys.argv[1]))
    write_result(Path(sys.argv[2]), replace(raw, parameters={}, figures=compact(raw.figures)))
