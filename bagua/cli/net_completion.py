"""`bagua-net completion`: the script that completes the package's commands in a shell."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from bagua.cli.completion import SHELLS, script

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands

_EPILOG = """\
bash    put into ~/.bashrc:                   source <(bagua-net completion bash)
zsh     put into ~/.zshrc, after compinit:    source <(bagua-net completion zsh)
fish    bagua-net completion fish > ~/.config/fish/completions/bagua-net.fish
"""


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description="Prints the script with which a shell completes bagua-net, bagua-net-bench, bagua and baguarun.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.cli.main import make_parser as make_main_parser
    from bagua.cli.net import make_parser as make_net_parser
    from bagua.net.bench.ring.options import make_parser as make_bench_parser
    from bagua.script.baguarun import make_parser as make_baguarun_parser

    bench = make_bench_parser()
    parsers = {
        "bagua-net": make_net_parser()[0],
        "bagua-net bench": bench,
        "bagua-net-bench": bench,
        "bagua": make_main_parser()[0],
        "baguarun": make_baguarun_parser(),
    }
    print(script(options.shell, parsers), end="")
    return 0
