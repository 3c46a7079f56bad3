"""`bagua-net compare -- CMD`: is CMD faster with the plugin, or with one setting than with another?"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.cli.parsers import Subcommands, command_of
from bagua.cli.terminal import Column, Terminal, table, width_of_stdout
from bagua.command_exit import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, CommandError, sigterm_as_interrupt
from bagua.net.bench.command_line import within

if TYPE_CHECKING:
    from bagua.net.compare.command_run import CommandRun
    from bagua.net.compare.report import Report
    from bagua.net.compare.setting import Setting

_UNITS = ("s", "ms", "us", "it/s")
_EPILOG = """\
examples:
  bagua-net compare -- torchrun --nproc-per-node 8 train.py
  bagua-net compare --pattern 'took ([0-9.]+) ms' --unit ms -- ./train.sh
  bagua-net compare --with plugin --with "plugin BAGUA_NET_NSTREAMS=8" -- torchrun train.py

exit status: 0 if all runs ended well, whatever the verdict; 1 if one failed; 2 if an option was wrong; 130 after
Ctrl-C.
"""


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "compare",
        help="find out whether a command is faster with the plugin",
        usage="bagua-net compare [option ...] [--] CMD [ARG ...]",
        description="Runs CMD without and with the plugin by turns, takes the times of its steps from its output, and "
        "says which is faster and why. CMD need not know of bagua.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--with",
        dest="settings",
        action="append",
        metavar="SETTING",
        help="what to compare, given twice: words VARIABLE=VALUE, plugin or no-plugin (default: no-plugin and plugin)",
    )
    parser.add_argument(
        "--rounds",
        type=within(int, 1, 1000),
        default=4,
        metavar="N",
        help="runs with each setting; three or more give a verdict (default: 4)",
    )
    parser.add_argument(
        "--time-limit",
        type=within(float, 1.0, 1e6),
        default=3600.0,
        metavar="S",
        help="seconds for all runs; no round begins that would take longer than is left (default: 3600)",
    )
    parser.add_argument(
        "--pattern",
        metavar="REGEX",
        help="regular expression whose one group is the time of a step in a line of output (default: common forms)",
    )
    parser.add_argument("--unit", choices=_UNITS, help="of the number that --pattern finds (default: s)")
    parser.add_argument(
        "--warmup",
        type=within(int, 0, 1_000_000),
        metavar="N",
        help="step times of each run to drop (default: 5, or a third if that is less)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="run all rounds, even if the first shows that the job does not use NCCL, the network or the plugin",
    )
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="keep the output and NCCL's logs of each run")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.net.bench.errors import UsageError

    command = command_of(options.command, "compare", "torchrun train.py")
    try:
        report = _compare(options, command)
    except UsageError as error:
        raise CommandError(str(error), EXIT_USAGE) from error
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    elif report.rounds.runs:
        print(_rendered(report, Terminal.of_stdout()))
    if report.rounds.error:
        print(f"bagua-net compare: {report.rounds.error}", file=sys.stderr)
        return EXIT_FAILURE
    return EXIT_INTERRUPTED if report.rounds.interrupted else 0


def _settings(texts: list[str] | None) -> tuple[Setting, Setting]:
    from bagua.net import notice
    from bagua.net.activation import original_environment
    from bagua.net.bench.errors import UsageError
    from bagua.net.compare.setting import default_settings, parse_setting

    base = original_environment()
    if texts is not None and len(texts) != 2:
        raise UsageError(f"--with is given {_times(len(texts))}; give it twice, or not at all")
    try:
        if texts is None:
            settings = default_settings(base)
        else:
            settings = parse_setting(texts[0], base), parse_setting(texts[1], base)
    except UsageError:
        raise
    except (ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error
    if settings[0].name == settings[1].name:
        raise UsageError(f"both settings are {settings[0].name!r}; give --with two different ones")
    for setting in settings:
        notice.report(setting.warnings, dict(base))
    return settings


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _compare(options: argparse.Namespace, command: list[str]) -> Report:
    from bagua.net.bench.command_line import make_folder
    from bagua.net.bench.errors import UsageError
    from bagua.net.bench.machine import describe_machine
    from bagua.net.compare.command_run import run_command
    from bagua.net.compare.report import Report
    from bagua.net.compare.rounds import folder_of, run_rounds
    from bagua.net.compare.step_sources import StepSource, default_sources, source_of_pattern
    from bagua.net.compare.verdict import is_pointless, judge
    from bagua.progress import Progress

    if options.unit is not None and options.pattern is None:
        raise UsageError(f"--unit {options.unit} is for --pattern; give both")
    sources: list[StepSource] = default_sources()
    try:
        if options.pattern is not None:
            sources = [source_of_pattern(options.pattern, options.unit or "s")]
        if options.output_dir is not None:
            make_folder("--output-dir", options.output_dir)
    except ValueError as error:
        raise UsageError(str(error)) from error
    settings = _settings(options.settings)
    with contextlib.ExitStack() as stack:
        root = options.output_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagua-compare-")))
        root = root.absolute()

        def runner(setting: Setting, number: int, timeout_s: float, on_line: Callable[[str], None]) -> CommandRun:
            folder = folder_of(root, settings.index(setting), number)
            return run_command(command, setting, number, folder, timeout_s, on_line)

        stack.enter_context(sigterm_as_interrupt())
        display = stack.enter_context(Progress(2 * options.rounds))
        rounds = run_rounds(
            *(settings, options.rounds, options.time_limit, sources, options.warmup, runner, display),
            is_pointless=lambda found: not options.keep_going and is_pointless(found, *settings),
        )
    return Report(command, settings, rounds, judge(rounds, *settings), describe_machine())


def _rendered(report: Report, terminal: Terminal) -> str:
    verdict = report.verdict
    # What each run took can be left out of a narrow terminal; the others cannot.
    columns = zip(*report.table(), strict=True)
    ranks = (0, 0, 1, 0)
    shown = [Column(title, cells, rank, left=True) for (title, *cells), rank in zip(columns, ranks, strict=True)]
    blocks = [table(shown, terminal, width_of_stdout())[0] + "\n"]
    blocks += [terminal.wrapped(note, "") for note in report.notes()]
    closing = [terminal.bold(verdict.headline), *verdict.reasons]
    blocks.append("\n".join(terminal.wrapped(text, "") if index else text for index, text in enumerate(closing)))
    return "\n".join(blocks)
