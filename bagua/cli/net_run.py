"""`bagua-net run -- CMD...` becomes CMD, with the variables that make its NCCL take the plugin. `bagua-net env` prints
them for a shell to take over: eval "$(bagua-net env)"."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from typing import NoReturn

from bagua.cli.parsers import Subcommands, command_of
from bagua.command_exit import CommandError
from bagua.net import native, notice, unknown_settings
from bagua.net.activation import ActivationState, Target, original_environment, plan
from bagua.net.nccl_config_file import config_files, read_settings
from bagua.net.secret_file import SECRET_FILE

# As env(1), nohup(1) and the shells do.
_EXIT_NOT_EXECUTABLE = 126
_EXIT_NOT_FOUND = 127
_BY_NAME_HELP = (
    "let NCCL find the plugin by its name, over LD_LIBRARY_PATH alone; for NCCL 2.12 to 2.20, which cannot be given a "
    "path"
)


def add_run(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "run",
        help="run a command with the plugin",
        usage="bagua-net run [-h] [--by-name] [--] CMD [ARG ...]",
        description="Runs CMD with the plugin: exit code, signals and terminal are CMD's own.",
    )
    parser.add_argument("--by-name", action="store_true", help=_BY_NAME_HELP)
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="the command and its arguments")
    parser.set_defaults(execute=run)


def run(options: argparse.Namespace) -> NoReturn:
    command = command_of(options.command, "run", "torchrun train.py", remedy=", and options of bagua-net before that")
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


def add_env(subcommands: Subcommands) -> None:
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
    parser.add_argument("--by-name", action="store_true", help=_BY_NAME_HELP)
    parser.set_defaults(execute=env)


def env(options: argparse.Namespace) -> int:
    _, changes = launch_changes(by_name=options.by_name)
    for name, value in changes.items():
        if options.shell == "fish":
            quoted = value.replace("\\", "\\\\").replace("'", "\\'")
            print(f"set -gx {name} '{quoted}'")
        else:
            print(f"export {name}={shlex.quote(value)}")
    return 0


def launch_changes(*, by_name: bool) -> tuple[dict[str, str], dict[str, str]]:
    """The user's environment, and what has to be set in it. Warnings go to stderr."""
    base = original_environment()
    target = Target.NEW_PROCESS_BY_NAME if by_name else Target.NEW_PROCESS
    try:
        result = plan(base, target)
    except (ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error
    if result.state is ActivationState.ACTIVE:
        settings = {item.name: item.value for item in read_settings(config_files(base))} | base
        secret = settings.get(SECRET_FILE, "").strip()
        # The ranks may start on other hosts, which have the file: a login node need not.
        is_elsewhere = bool(secret) and not os.path.lexists(secret)
        try:
            refusals = native.refusals(settings, with_secret=not is_elsewhere)
        except RuntimeError as error:
            raise CommandError(str(error)) from error
        if refusals:
            raise CommandError("\n".join(refusals))
        if is_elsewhere:
            notice.report(
                [f"{SECRET_FILE}={secret}: this host has no such file. Ranks that start here will fail."], base
            )
        unknown_settings.report(base)
    # What was said is recorded in the environment that the command will have.
    notice.report(result.warnings, base)
    return base, dict(result.changes)
