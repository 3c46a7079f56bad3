"""`bagua-net env`: prints the variables for a shell to take over: eval "$(bagua-net env)"."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from bagua.cli.launch_changes import BY_NAME_HELP, launch_changes

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "env",
        help="print the variables for a shell",
        description='Prints what a shell has to export, for: eval "$(bagua-net env)". Messages go to stderr.',
    )
    parser.add_argument(
        "--shell",
        choices=("sh", "fish"),
        default="sh",
        help="the shell that reads it; sh is right for bash, zsh, dash and ksh (default: sh)",
    )
    parser.add_argument("--by-name", action="store_true", help=BY_NAME_HELP)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    _, changes = launch_changes(by_name=options.by_name)
    for name, value in changes.items():
        if options.shell == "fish":
            quoted = value.replace("\\", "\\\\").replace("'", "\\'")
            print(f"set -gx {name} '{quoted}'")
        else:
            print(f"export {name}={shlex.quote(value)}")
    return 0
