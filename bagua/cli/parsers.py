"""What the programs with subcommands share: what they say of a word that they do not know, and how they end."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn, TypeAlias

from bagua.command_exit import EXIT_INTERRUPTED, EXIT_USAGE, CommandError, run_with_stdout

# What `add_subparsers` returns, which argparse does not name in public.
Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def run_program(parser: argparse.ArgumentParser, commands: Subcommands, arguments: Sequence[str] | None = None) -> int:
    """Parse, call the subcommand's `execute`, and return the exit code. `commands` writes to `options.subcommand`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words and words[0].startswith("-"):
        own = _options(parser)
        if not any(option.startswith(words[0]) for option in own):  # argparse takes abbreviations
            _refuse(parser, f"unknown option {words[0]}", words[0], own)
    elif words and words[0] not in commands.choices:
        _refuse(parser, f"unknown command {words[0]!r}", words[0], commands.choices)
    if (unfinished := _without_subcommand(parser, words)) is not None:
        unfinished.print_help(sys.stderr)
        return EXIT_USAGE
    options, unknown = parser.parse_known_args(words)
    if unknown:
        # argparse would show the usage of the program instead of the subcommand's.
        command = commands.choices[options.subcommand]
        _refuse(command, f"unknown argument {unknown[0]!r}", unknown[0].partition("=")[0], _options(command))
    try:
        return run_with_stdout(f"{parser.prog} {options.subcommand}", lambda: int(options.execute(options)))
    except CommandError as error:
        print(f"{parser.prog} {options.subcommand}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def command_of(words: list[str], subcommand: str, example: str, noun: str = "command", remedy: str = "") -> list[str]:
    """The command of the user's that follows the options of a subcommand."""
    command = words[1:] if words[:1] == ["--"] else words
    if not command or not command[0]:
        raise CommandError(
            f"no {noun} given; write it after the options: bagua-net {subcommand} -- {example}", EXIT_USAGE
        )
    if command[0].startswith("-"):
        raise CommandError(
            f"{command[0]} is neither an option of `{subcommand}` nor a {noun}; put `--` before the {noun}{remedy}",
            EXIT_USAGE,
        )
    return command


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _without_subcommand(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser | None:
    """The parser whose subcommand is missing after these words; None: there are other words, or all are there."""
    below = next((one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
    if not words:
        return None if below is None else parser
    return None if below is None or words[0] not in below else _without_subcommand(below[words[0]], words[1:])


def _refuse(parser: argparse.ArgumentParser, what: str, word: str, known: Iterable[str]) -> NoReturn:
    # Hyphens are no similarity: --wrong is not --json.
    names = {name.lstrip("-"): name for name in known}
    if near := difflib.get_close_matches(word.lstrip("-"), names, n=1):
        parser.error(f"{what}; did you mean {names[near[0]]}?")
    parser.error(f"{what}; `{parser.prog} --help` lists what there is")
