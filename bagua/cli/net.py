"""`bagua-net`: switch Bagua-Net on and off, and find out whether it works."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from bagua.cli import (
    net_blame,
    net_compare,
    net_completion,
    net_doctor,
    net_enable,
    net_exporter,
    net_run,
    net_secret,
    net_settings,
    net_stats,
    net_test,
    net_top,
    net_trace,
)
from bagua.cli.parsers import Subcommands, run_program
from bagua.version import __version__

_EPILOG = """\
Ways to use the plugin:
  ENABLE_BAGUA_NET=1 torchrun train.py    a torch job; the script need not import bagua
  bagua-net run -- ./all_reduce_perf      any command
  eval "$(bagua-net env)"                 everything started from this shell
  bagua-net enable                        every job of this user, from NCCL's own configuration file

`bagua-net doctor` tells whether a job would use it, `bagua-net test` what it gains between two nodes, and
`bagua-net compare` whether a job of yours is faster with it. `bagua-net stats` and `bagua-net top` show what running
jobs do, and `bagua-net blame` names the process that holds a job up. `bagua-net-bench` shows what the plugin can do on
this machine.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["bench"]:
        from bagua.cli import net_bench

        return net_bench.main(words[1:])
    parser, commands = make_parser()
    return run_program(parser, commands, words)


def make_parser() -> tuple[argparse.ArgumentParser, Subcommands]:
    parser = argparse.ArgumentParser(
        prog="bagua-net",
        description="Switches Bagua-Net, the NCCL network plugin, on and off, and finds out whether it works.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bagua-net {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    parser._positionals._group_actions.remove(subcommands)  # shown in groups instead
    groups: dict[str, Sequence[Callable[[Subcommands], object]]] = {
        "switch it on and off": (net_run.add_run, net_run.add_env, net_enable.add_enable, net_enable.add_disable),
        "check": (net_doctor.add_parser,),
        "measure": (net_test.add_parser, net_compare.add_parser, _add_bench),
        "watch": (
            *(net_stats.add_parser, net_top.add_parser, net_blame.add_parser),
            *(net_exporter.add_parser, net_trace.add_parser),
        ),
        "set up": (
            *(net_settings.add_parser, net_secret.add_parser),
            partial(net_completion.add_parser, program=parser),
        ),
    }
    for title, adders in groups.items():
        shown = len(subcommands._choices_actions)
        for add in adders:
            add(subcommands)
        parser.add_argument_group(title)._group_actions += subcommands._choices_actions[shown:]
    return parser, subcommands


def _add_bench(subcommands: Subcommands) -> None:
    subcommands.add_parser("bench", help="measure the network: another name of bagua-net-bench", add_help=False)


if __name__ == "__main__":
    sys.exit(main())
