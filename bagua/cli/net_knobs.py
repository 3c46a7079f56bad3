"""`bagua-net settings` (or `knobs`): every setting of Bagua-Net with type, default, range and meaning."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from bagua.command_exit import CommandError

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "settings",
        aliases=["knobs"],
        help="list the settings of Bagua-Net",
        description="Lists every environment variable that Bagua-Net reads.",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    from bagua.cli.terminal import Terminal
    from bagua.net import native

    try:
        knobs = native.knobs()
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    if options.json:
        print(json.dumps([knob.as_json() for knob in knobs], indent=2))
        return 0
    terminal = Terminal.of_stdout()
    for knob in knobs:
        unit = f" ({knob.unit})" if knob.unit else ""
        print(terminal.bold(knob.name))
        print(f"    {knob.type}, default {knob.default_value}, range {knob.range}{unit}")
        print(terminal.wrapped(knob.meaning, "    "))
    return 0
