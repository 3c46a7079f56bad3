"""`bagua-net test -- LAUNCHER ...`: what the plugin gains between the nodes on which the launcher starts ranks."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.cli.parsers import Subcommands, command_of
from bagua.cli.terminal import Column, Terminal, table, width_of_stdout
from bagua.command_exit import EXIT_USAGE, CommandError, sigterm_as_interrupt
from bagua.net.bench.command_line import within

_EPILOG = """\
examples (the script is ours; start the command wherever you start the launcher, for torchrun on every node):
  bagua-net test -- torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29500
  bagua-net test -- srun --nodes 2 --ntasks-per-node 1
  bagua-net test -- mpirun --host node0,node1 -x MASTER_ADDR=node0

exit status: 0 if the test was done, whatever it says; 1 if a rank failed; 2 if an option was wrong; 130 after Ctrl-C.
"""


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "test",
        help="try the plugin between nodes: GB/s without and with it",
        usage="bagua-net test [option ...] [--] LAUNCHER [OPTION ...]",
        description="Starts LAUNCHER with a small all-reduce job of its own, which runs without and with the plugin by"
        " turns. The command of rank 0 prints GB/s, what limits the network, and what to put into the job script.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds",
        type=within(int, 1, 100),
        default=3,
        metavar="N",
        help="turns without and with the plugin; three or more give a verdict (default: 3)",
    )
    parser.add_argument(
        "--seconds",
        type=within(float, 0.01, 600.0),
        default=1.5,
        metavar="S",
        help="for which each of the three sizes is measured in a turn (default: 1.5)",
    )
    parser.add_argument(
        "--wait",
        type=within(float, 1.0, 86400.0),
        default=120.0,
        metavar="S",
        help="seconds until all ranks have started and met (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("command", metavar="LAUNCHER", nargs=argparse.REMAINDER, help="the launcher with its options")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.net import notice
    from bagua.net.activation import original_environment
    from bagua.net.bench.errors import BenchError
    from bagua.net.compare.setting import default_settings
    from bagua.net.network_test.command import Plan, run_launcher

    words = _launcher(options.command)
    environment = original_environment()
    try:
        notice.report(default_settings(environment)[1].warnings, dict(environment))
        with sigterm_as_interrupt():
            result = run_launcher(words, Plan(options.rounds, options.seconds, options.wait), environment, _say)
    except (BenchError, ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error
    if result is None:
        _say("done; the command on the node of rank 0 prints the result")
    elif options.json:
        print(json.dumps(result["report"], indent=2))
    else:
        print(_rendered(result["report"], result["rows"], Terminal.of_stdout()))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _launcher(words: list[str]) -> list[str]:
    from bagua.net.network_test.command import users_script

    words = command_of(words, "test", "torchrun --nnodes 2 ...", "launcher")
    script = users_script(words)
    if script is not None:
        raise CommandError(
            f"`test` runs a script of its own; leave yours out: bagua-net test -- {shlex.join(words[:script])}\n"
            f"To measure your own job, run: bagua-net compare -- {shlex.join(words)}",
            EXIT_USAGE,
        )
    return words


def _rendered(report: Mapping[str, Any], rows: Sequence[Sequence[str]], terminal: Terminal) -> str:
    names = ("gloo", "gloo") if report["backend"] == "gloo" else ("without", "with")
    titles = ("size", f"{names[0]} GB/s", f"{names[1]} GB/s", "speed-up")
    cells = zip(*rows, strict=True)
    shown = [
        Column(title, column, left=number == 3)
        for number, (title, column) in enumerate(zip(titles, cells, strict=True))
    ]
    head = f"all-reduce, {report['ranks']} ranks, {report['backend']}; GB/s is the bus bandwidth (busbw)"
    found = [terminal.bold(terminal.wrapped(report["headline"], ""))]
    found += [terminal.wrapped(reason, "") for reason in report["reasons"]]
    advice = [line if line.startswith(" ") else terminal.wrapped(line, "") for line in report["advice"].splitlines()]
    blocks = [terminal.wrapped(head, ""), table(shown, terminal, width_of_stdout())[0]]
    return "\n\n".join([*blocks, "\n".join(found), "\n".join(advice)])
