"""`bagua tune report`: what `with_bagua(..., autotune=True)` has tried, and what it means."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.cli.parsers import Subcommands
from bagua.cli.terminal import Column, Terminal, table, width_of_stdout
from bagua.command_exit import CommandError

if TYPE_CHECKING:
    from bagua.tuning.memory import Answer


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "tune", help="results of tuning", description="Results of with_bagua(..., autotune=True) on this machine."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    report = actions.add_parser(
        "report",
        help="what was tried, and what it means",
        description="Prints what tuning has tried, with the step time and the exposed communication time of each "
        "setting, and the advice that follows. Results are kept in $XDG_CACHE_HOME/bagua/tuning (~/.cache).",
    )
    report.add_argument("model", nargs="?", default="", metavar="MODEL", help="only models whose name has this in it")
    report.add_argument("--all", action="store_true", help="all results; otherwise the latest")
    report.add_argument("--json", action="store_true", help="print JSON: a list of results, times in seconds")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw the latest of them (.png, .svg or .pdf)")
    report.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.tuning import memory
    from bagua.tuning.advice import advice

    try:
        every = memory.read_all()
    except (OSError, RuntimeError) as error:
        raise CommandError(
            f"the results cannot be listed: {error}.\n"
            "They are in $XDG_CACHE_HOME/bagua/tuning or else ~/.cache/bagua/tuning.\n"
            "Set XDG_CACHE_HOME to an absolute path that this user may read."
        ) from error
    found = [(path, answer) for path, answer in every if options.model in answer.fingerprint.model]
    if not found:
        of = f" of a model with {options.model!r} in its name" if options.model else ""
        raise CommandError(
            f"there is no result{of} in {memory.folder()}.\n"
            "Train with with_bagua(..., autotune=True), or BAGUA_AUTOTUNE=1, as the same user on this machine."
        )
    if options.plot is not None:
        _plot(options.plot, found[-1][1])
    shown = found if options.all else found[-1:]
    if options.json:
        documents = [{"file": str(path), **answer.as_json(), "advice": advice(answer)} for path, answer in shown]
        print(json.dumps(documents, indent=1, allow_nan=False))
        return 0
    terminal = Terminal.of_stdout()
    for number, (path, answer) in enumerate(shown):
        head = "\n".join(terminal.wrapped(line, "  ", "") for line in _head(path, answer))
        lines = "\n".join(terminal.wrapped(f"Advice: {line}", "  ", "") for line in advice(answer))
        note = f"\n\n{terminal.wrapped(_PAIRS, '')}" if _medians_disagree(answer) else ""
        print("\n" * (number > 0) + f"{head}\n\n{_table(answer, terminal)}{note}\n\n{lines}")
    return 0


def _head(path: Path, answer: Answer) -> list[str]:
    one = answer.fingerprint
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(answer.found_at))
    return [
        f"{one.model}: {one.world}; {one.hardware}; {one.network}",
        f"May be used: {one.space}",
        f"Tuned {when} in {answer.steps} steps: {answer.setting}; {answer.reason}",
        f"File: {path}",
    ]


def _table(answer: Answer, terminal: Terminal) -> str:
    tried = sorted(answer.tried, key=lambda one: one.ratio)
    marks = ["* " if one.setting == answer.setting else "  " for one in tried]
    columns = [
        Column("setting", [f"{mark}{one.setting}" for mark, one in zip(marks, tried, strict=True)], left=True),
        Column("step ms", [_ms(one.step_s) for one in tried], 1),
        Column("exposed ms", [_ms(one.exposed_s) for one in tried], 2),
        Column("communication ms", [_ms(one.communication_s) for one in tried], 3),
        Column("speed", [f"{1 / one.ratio:.2f}x" for one in tried]),
        Column("turns", [str(one.turns) for one in tried], 4),
    ]
    return table(columns, terminal, width_of_stdout())[0]


# Why a setting with shorter steps can have a lower speed.
_PAIRS = (
    "Speed compares steps with those of the default that ran right before or after them. The milliseconds are medians "
    "over different periods of the run, in which the machine may have been faster or slower. Where the two disagree, "
    "rely on the speed."
)


def _medians_disagree(answer: Answer) -> bool:
    """Whether a setting is faster than the default by one of the two figures and slower by the other."""
    return any((one.step_s - answer.tried[0].step_s) * (one.ratio - 1) < 0 for one in answer.tried)


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{1e3 * seconds:.1f}"


def _plot(path: Path, answer: Answer) -> None:
    from bagua.tuning.plot import PlotError, write_plot

    try:
        write_plot(path, answer)
    except (PlotError, OSError) as error:
        raise CommandError(str(error)) from error
