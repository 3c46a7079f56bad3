"""`bagua-net disable`: takes back what `bagua-net enable` wrote."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from bagua.cli.config_file_options import add_file_options, chosen_file
from bagua.command_exit import CommandError

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "disable",
        help="take the plugin out of NCCL's configuration file",
        description="Removes the line that `bagua-net enable` wrote, and puts back what it set aside.",
    )
    add_file_options(parser)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.net import nccl_config_file
    from bagua.net.activation import original_environment

    file = chosen_file(options, original_environment())
    try:
        changed = nccl_config_file.disable(file)
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    print(f"{file}: " + ("restored as it was before `bagua-net enable`" if changed else "nothing of ours to remove"))
    left = [item.value for item in nccl_config_file.read_settings([file]) if item.name == "NCCL_NET_PLUGIN"]
    if left:
        print(f"bagua-net disable: your own line NCCL_NET_PLUGIN={left[0]} was left there", file=sys.stderr)
    return 0
