"""All runs: A B B A A B B A ..., so that a drift of the machine falls on both settings alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagua.net.bench.turns import Turns
from bagua.net.compare.command_run import CommandRun, RunError
from bagua.net.compare.setting import Setting
from bagua.net.compare.step_sources import StepSource, TrafficTime, WallTime, choose_source
from bagua.progress import Progress

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


# (setting, round, timeout_s, on_line) -> run
Runner = Callable[[Setting, int, float, Callable[[str], None]], CommandRun]


@dataclass
class Rounds:
    """What ran, and why it ended before its time.

    Attributes:
        figures: of each run; those of a setting are in the order of its rounds.
    """

    runs: list[CommandRun] = field(default_factory=list)
    figures: list[RunFigure] = field(default_factory=list)
    source: StepSource | None = None
    error: str = ""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def of(self, setting: Setting) -> list[tuple[CommandRun, RunFigure]]:
        pairs = zip(self.runs, self.figures, strict=True)
        return sorted(((r, f) for r, f in pairs if r.setting is setting), key=lambda pair: pair[0].round)


def run_rounds(
    settings: Sequence[Setting],
    rounds: int,
    time_limit_s: float,
    sources: Sequence[StepSource],
    warmup: int | None,
    runner: Runner,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
    *,
    is_pointless: Callable[[Rounds], bool] = lambda _: False,
) -> Rounds:
    """Ends early, with what there is, at the first failure, on Ctrl-C, before a round for which no time is left, and
    after a first round that shows that more are pointless."""
    found = Rounds()
    deadline = clock() + time_limit_s
    numbered = {str(number): setting for number, setting in enumerate(settings)}  # names may be the same
    turns: Turns[None] = Turns()

    def measure(_case: str, which: str, number: int) -> None:
        _run_once(found, numbered[which], number, deadline - clock(), sources, warmup, runner, progress)

    def stop_reason(ran: int) -> str | None:
        return "more cannot compare anything; --keep-going runs all" if ran == 1 and is_pointless(found) else None

    try:
        turns.take(
            {"": list(numbered)},
            rounds,
            measure,
            time_limit_s=time_limit_s,
            rounds_first=True,
            stop_reason=stop_reason,
            failures=(),
            clock=clock,
        )
    except (RunError, ValueError, OSError) as error:
        found.error = str(error)
    except KeyboardInterrupt:
        found.interrupted = True
    found.notes += turns.notes
    return found


def _run_once(
    found: Rounds,
    setting: Setting,
    number: int,
    timeout_s: float,
    sources: Sequence[StepSource],
    warmup: int | None,
    runner: Runner,
    progress: Progress,
) -> None:
    what = f"round {number + 1}, {setting.name}"
    last = ""

    def show(line: str) -> None:
        nonlocal last
        last = "".join(letter for letter in line.strip() if letter.isprintable()) or last
        progress.advance(f"{what}: {last}" if last else what, 0)

    show("")
    run = runner(setting, number, max(timeout_s, 0.1), show)
    if found.source is None:
        found.source = choose_source(sources, run)
    elif isinstance(found.source, TrafficTime) and run.middle_s is None:
        # This setting may keep the ranks off TCP.
        found.source = WallTime()
        found.figures = [figure_of(found.source, one, warmup) for one in found.runs]
    figure = figure_of(found.source, run, warmup)
    found.runs.append(run)
    found.figures.append(figure)
    progress.advance(what)
    steps = f"{figure.steps} steps, " if figure.steps > 1 else ""
    progress.message(f"{what}: {figure.ms_text()} ms ({steps}{run.wall_s:.0f} s in all)")


def folder_of(root: Path, setting_index: int, round_number: int) -> Path:
    """Of one run; without the logs of an earlier one."""
    folder = root / f"round{round_number + 1}-{'ab'[setting_index]}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("nccl.*.log"):
        stale.unlink()
    return folder
