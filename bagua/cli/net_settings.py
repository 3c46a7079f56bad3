"""`bagua-net settings` (or `knobs`): every setting of Bagua-Net with type, default, range and meaning."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from bagua.cli.parsers import Subcommands
from bagua.cli.terminal import Terminal
from bagua.command_exit import CommandError


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
    from bagua.net import native

    try:
        settings = native.knobs()
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    if options.json:
        print(json.dumps([asdict(setting) for setting in settings], indent=2))
        return 0
    terminal = Terminal.of_stdout()
    for setting in settings:
        unit = f" ({setting.unit})" if setting.unit else ""
        print(terminal.bold(setting.name))
        print(f"    {setting.type}, default {setting.default_value}, range {setting.range}{unit}")
        print(terminal.wrapped(setting.meaning, "    "))
    return 0
