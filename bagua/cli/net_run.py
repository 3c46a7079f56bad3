"""`bagua-net run -- CMD...`: becomes CMD, with the variables that make its NCCL take the plugin."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from bagua.cli.launch_changes import BY_NAME_HELP, launch_changes
from bagua.command_exit import EXIT_USAGE, CommandError

if TYPE_CHECKING:
    from bagua.cli.parsers import Subcommands

# As env(1), nohup(1) and the shells do.
_EXIT_NOT_EXECUTABLE = 126
_EXIT_NOT_FOUND = 127


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "run",
        help="run a command with the plugin",
        usage="bagua-net run [-h] [--by-name] [--] CMD [ARG ...]",
        description="Runs CMD with the plugin: exit code, signals and terminal are CMD's own.",
    )
    parser.add_argument("--by-name", action="store_true", help=BY_NAME_HELP)
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> NoReturn:
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command or not command[0]:
        raise CommandError(
            "no command given; write it after the options: bagua-net run -- torchrun train.py", EXIT_USAGE
        )
    if command[0].startswith("-"):
        raise CommandError(
            f"{command[0]} is neither an option of `run` nor a command; put `--` before the command, and options of "
            "bagua-net before that",
            EXIT_USAGE,
        )
    base, changes = launch_changes(by_name=options.by_name)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores SIGPIPE, and an ignored signal stays ignored in what we become: `CMD | head` would not end.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if hasattr(signal, "SIGXFSZ"):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, base | changes)
    except FileNotFoundError as error:
        raise CommandError(f"{command[0]}: no such command; check its name and PATH", _EXIT_NOT_FOUND) from error
    except OSError as error:
        raise CommandError(
            f"{command[0]} cannot be run ({error.strerror}); check that it is an executable file", _EXIT_NOT_EXECUTABLE
        ) from error
