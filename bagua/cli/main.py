"""`bagua`: what tuning while training has measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagua.cli import tune
from bagua.cli.parsers import run_program
from bagua.version import __version__

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands

_EPILOG = """\
The other commands of this package:
  bagua-net         the NCCL plugin: switch it on, check it, watch it
  bagua-net-bench   measure the network
  baguarun          start a job on several hosts over ssh
  python -m bagua.distributed.run      start a job on this host, like torchrun
"""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = make_parser()
    if words and words[0] not in commands.choices:
        from bagua.cli.net import make_parser as make_net_parser

        if words[0] in make_net_parser()[1].choices:
            parser.error(f"unknown command {words[0]!r}; that is `bagua-net {words[0]}`")
    return run_program(parser, commands, words)


def make_parser() -> tuple[argparse.ArgumentParser, Subcommands]:
    parser = argparse.ArgumentParser(
        prog="bagua",
        description="Shows what with_bagua(..., autotune=True) has measured on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bagua {__version__}")
    subcommands = parser.add_subparsers(dest="subcommand", metavar="COMMAND", required=True)
    tune.add_parser(subcommands)
    return parser, subcommands


if __name__ == "__main__":
    sys.exit(main())
