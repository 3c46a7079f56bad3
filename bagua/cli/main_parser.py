"""The parser of `bagua`, which `bagua-net completion` needs, too."""

from __future__ import annotations

import argparse

from bagua.cli import tune
from bagua.cli.parsers import Subcommands
from bagua.version import __version__

_EPILOG = """\
The other commands of this package:
  bagua-net         the NCCL plugin: switch it on, check it, watch it
  bagua-net-bench   measure the network
  baguarun          start a job on several hosts over ssh
  python -m bagua.distributed.run      start a job on this host, like torchrun
"""


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
