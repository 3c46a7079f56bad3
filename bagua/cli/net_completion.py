"""`bagua-net completion`: the script that completes the package's commands in a shell."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from bagua.cli.completion import SHELLS, script

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands

_EPILOG = """\
bash    put into ~/.bashrc:                   source <(bagua-net completion bash)
zsh     put into ~/.zshrc, after compinit:    source <(bagua-net completion zsh)
fish    bagua-net completion fish > ~/.config/fish/completions/bagua-net.fish
"""


def add_parser(subcommands: Subcommands, program: argparse.ArgumentParser) -> None:
    """`program`: of `bagua-net` itself."""
    parser = subcommands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description="Prints the script with which a shell completes bagua-net, bagua-net-bench and bagua.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(execute=partial(_execute, program))


def _execute(program: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from bagua.cli.main_parser import make_parser as make_main_parser
    from bagua.net.bench.ring.options import make_parser as make_bench_parser

    bench = make_bench_parser()
    parsers = {
        "bagua-net": program,
        "bagua-net bench": bench,
        "bagua-net-bench": bench,
        "bagua": make_main_parser()[0],
    }
    print(script(options.shell, parsers), end="")
    return 0
