"""The measuring: many short runs of bagua-net-bench, each with fresh processes.

Base and tree change places from round to round, so that whatever depends on the place (who ran before, who was started
first) falls on both alike.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bagua.net.bench.api import (
    BASELINE,
    LATENCY_LIMIT_BYTES,
    BenchError,
    Progress,
    ResultFile,
    Turns,
    least_repetitions,
    read_result,
    running,
    start_command,
)

# The spread holds the true median but for this chance. Of 40 judgements without a change (20 rows, time and CPU) one is
# then wrong in every 25 runs, and half of those say slower.
ERROR_CHANCE = 0.001
# Fewer could not be that sure. A round is a fresh start of all processes, and a start has its luck: where buffers,
# ports and threads come to lie shifts a ratio by some percent for as long as the processes live. So the rounds are the
# sample, and not the repetitions within one.
MIN_ROUNDS = least_repetitions(ERROR_CHANCE)
PLUGIN, BARE = "plugin", "bare"
# The orders of the two: whatever depends on the place falls on both alike.
_TREE_FIRST, _BASE_FIRST = "tree first", "base first"
# A round's ratio is the median of so many paired ones. Odd, so that it is one of them.
REPEATS = 5
# The least that bagua-net-bench takes.
_MIN_BUDGET_S = 1.0
# Starting Python and ending the drivers, which is not in the bench's own budget.
_OVERHEAD_S = 0.6
# Beyond its budget: a machine so slow that single iterations of the largest size overdraw it.
_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Part:
    """What one bench run of a round covers."""

    channels: int
    smallest: str
    largest: str
    share: float  # of the time
    rate: str | None = None  # of the link between two emulated hosts (netlab); None: over loopback

    @property
    def place(self) -> str:
        return "loopback" if self.rate is None else self.rate


# What is faster over loopback may be slower between hosts, and these are what users have.
PARTS = (
    Part(channels=2, smallest="8", largest="128M", share=0.4),
    Part(channels=8, smallest="1K", largest="4M", share=0.2),
    Part(channels=8, smallest="64K", largest="16M", share=0.4, rate="10G"),
)


@dataclass(frozen=True)
class Libraries:
    base: Path
    tree: Path
    driver: Path


@dataclass
class RowSamples:
    """One size at one number of channels, in one place; an entry a round."""

    time_ratios: list[float] = field(default_factory=list)  # tree over base
    cpu_ratios: list[float] = field(default_factory=list)  # empty where the kernel counted none
    over_bare: list[float] = field(default_factory=list)  # tree over the bare ring; every other round
    base_us: list[float] = field(default_factory=list)
    tree_us: list[float] = field(default_factory=list)


# (place, channels, bytes) -> samples, in the order of the table.
Rows = dict[tuple[str, int, int], RowSamples]


def measure(
    libraries: Libraries,
    *,
    rounds: int,
    seconds: float,
    environment: Mapping[str, str],
    parts: tuple[Part, ...] = PARTS,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Rows:
    """Fewer rounds, but never less than MIN_ROUNDS, where the machine is too slow for all of them. Base and tree have
    each place equally often: two rounds are one of `Turns`."""
    rows: Rows = {}
    by_name = {f"{part.channels} channels, {part.place}": part for part in parts}
    pairs = -(-rounds // 2)
    deadline = clock() + seconds
    with tempfile.TemporaryDirectory(prefix="bagua-perf-") as folder:
        result = Path(folder) / "round.json"
        taken: list[str] = []

        def turn(name: str, order: str, _pair: int) -> None:
            part, swapped = by_name[name], order == _BASE_FIRST
            of_round = (deadline - clock()) / (2 * pairs - len(taken) / len(parts)) - _OVERHEAD_S * len(parts)
            budget_s = max(_MIN_BUDGET_S, of_round * part.share)
            verify = name not in taken
            taken.append(name)
            command = bench_command(libraries, part, budget_s, result, swapped=swapped, verify=verify)
            _run_bench(command, environment, budget_s + _PATIENCE_S)
            add_round(rows, part, read_result(result), swapped=swapped)

        Turns[None]().take(
            dict.fromkeys(by_name, (_TREE_FIRST, _BASE_FIRST)),
            pairs,
            turn,
            time_limit_s=seconds,
            rounds_first=True,
            least_rounds=-(-MIN_ROUNDS // 2),
            failures=(),
            progress=progress,
            clock=clock,
        )
    order = [(part.place, part.channels) for part in parts]
    return dict(sorted(rows.items(), key=lambda row: (order.index(row[0][:2]), row[0][2])))


def bench_command(
    libraries: Libraries, part: Part, budget_s: float, result: Path, *, swapped: bool, verify: bool
) -> list[str]:
    plugin, baseline = (libraries.base, libraries.tree) if swapped else (libraries.tree, libraries.base)
    command = [sys.executable, "-m", "bagua.cli.net_bench", "--backends", f"{PLUGIN},{BARE}"]
    if part.rate is None:
        command += ["--local"]
    else:
        command = [sys.executable, "-m", "netlab", "run", "--rate", part.rate, "--", *command]
    command += ["--driver", str(libraries.driver), "--library", str(plugin), "--baseline-library", str(baseline)]
    command += ["--channels", str(part.channels), "-b", part.smallest, "-e", part.largest, "-f", "4"]
    # Verifying is part of the budget.
    budget_s = 3 * budget_s if verify else budget_s
    command += ["--repeats", str(REPEATS), "--time-budget", f"{budget_s:.2f}", "--json", str(result)]
    # The bytes are the same in every round.
    return command if verify else [*command, "--no-verify"]


def add_round(rows: Rows, part: Part, result: ResultFile, *, swapped: bool) -> None:
    """result: what bagua-net-bench wrote with --json."""
    tree, base = (BASELINE, PLUGIN) if swapped else (PLUGIN, BASELINE)
    for speedup in result.select("speedup", backend=PLUGIN):
        size = int(speedup.case["size_bytes"] or 0)
        row = rows.setdefault((part.place, part.channels, size), RowSamples())
        if speedup.case["baseline"] == BARE:
            if not swapped:
                row.over_bare.append(1 / speedup.median)
            continue
        row.time_ratios.append(speedup.median if swapped else 1 / speedup.median)
        for cpu in result.select("cpu_ratio", backend=PLUGIN, baseline=BASELINE, size_bytes=size):
            row.cpu_ratios.append(1 / cpu.median if swapped else cpu.median)
        # The statistic of which the ratios are.
        metric = "latency_p50" if size <= LATENCY_LIMIT_BYTES else "time"
        row.tree_us.append(result.find(metric, backend=tree, size_bytes=size).median)
        row.base_us.append(result.find(metric, backend=base, size_bytes=size).median)


def _run_bench(command: list[str], environment: Mapping[str, str], timeout_s: float) -> None:
    # The source tree, which has no library, must not come before the installed package.
    clean = {**environment, "PYTHONSAFEPATH": "1"}
    shown = " ".join(command)
    try:
        with running(lambda: start_command(command, clean, BenchError)) as process:
            output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        raise BenchError(
            f"bagua-net-bench was not done after {timeout_s:.0f} s; is the machine overloaded? its command: {shown}"
        ) from error
    if process.returncode != 0:
        wrong = [line for line in output.splitlines() if line.startswith(("WRONG DATA", "bagua-net-bench: error"))]
        said = "\n".join(wrong or output.splitlines()[-8:])
        raise BenchError(f"bagua-net-bench exited with {process.returncode} ({shown}):\n{said}")
