"""One figure for each run: the median of its steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bagua.net.compare.command_run import CommandRun
from bagua.net.compare.step_sources import StepSource

# Communicators are created and kernels chosen in these; of a short run, at most a third.
WARMUP_STEPS = 5


@dataclass(frozen=True)
class RunFigure:
    """The figure of one run: the median of its steps, in seconds."""

    seconds: float
    steps: int
    dropped: int = 0

    def ms_text(self) -> str:
        """Four digits, or all in front of the point."""
        ms = self.seconds * 1e3
        return f"{ms:.0f}" if ms >= 1000 else f"{ms:.4g}"


def figure_of(source: StepSource, run: CommandRun, warmup: int | None) -> RunFigure:
    """
    Args:
        warmup: steps to drop; None: WARMUP_STEPS, or a third if that is less.

    Raises:
        ValueError: there are too few.
    """
    times = source.read(run)
    count = len(times.seconds)
    where = f"{run.setting.name}, round {run.round + 1}"
    if not count:
        raise ValueError(
            f"{where}: no step times in its output, where the first run had {source.name}\n"
            "Let rank 0 print the same lines in every run."
        )
    if times.is_summary:
        return RunFigure(times.seconds[-1], count)
    dropped = min(WARMUP_STEPS, count // 3) if warmup is None else warmup
    if dropped >= count:
        raise ValueError(
            f"{where}: too few steps: {count} found, and --warmup {dropped} drops them all\n"
            "Let the command do more steps, or lower --warmup."
        )
    return RunFigure(statistics.median(times.seconds[dropped:]), count - dropped, dropped)
