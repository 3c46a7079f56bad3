"""`bagua-net completion`: scripts with which shells complete this package's commands, made from their parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bagua.cli.parsers import Subcommands

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\
bash    put into ~/.bashrc:                   source <(bagua-net completion bash)
zsh     put into ~/.zshrc, after compinit:    source <(bagua-net completion zsh)
fish    bagua-net completion fish > ~/.config/fish/completions/bagua-net.fish
"""


def add_parser(subcommands: Subcommands, program: argparse.ArgumentParser) -> None:
    """`program`: of `bagua-net` itself."""
    parser = subcommands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description="Prints the script with which a shell completes bagua-net, bagua-net-bench and bagua.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(execute=partial(_execute, program))


def _execute(program: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from bagua.cli.main_parser import make_parser as make_main_parser
    from bagua.net.bench.ring.options import make_parser as make_bench_parser

    bench = make_bench_parser()
    parsers = {
        "bagua-net": program,
        "bagua-net bench": bench,
        "bagua-net-bench": bench,
        "bagua": make_main_parser()[0],
    }
    print(script(options.shell, parsers), end="")
    return 0


@dataclass(frozen=True)
class Option:
    """
    Attributes:
        values: what it may be given; empty for a file, a number or a text.
        takes_value: whether a value follows it.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool = False
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """
    Attributes:
        path: the program and its subcommands, such as ("bagua", "tune", "report").
        values: of its positional arguments.
    """

    path: tuple[str, ...]
    help: str
    subcommands: tuple[str, ...]
    options: tuple[Option, ...]
    values: tuple[str, ...] = ()


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...], text: str = "") -> Iterator[Command]:
    """Of this parser, and of all below it."""
    options: list[Option] = []
    values: list[str] = []
    below: dict[str, argparse.ArgumentParser] = {}
    texts: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
            texts |= {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.help == argparse.SUPPRESS:
            continue
        elif action.option_strings:
            choices = tuple(map(str, action.choices or ()))
            help_text = " ".join(str(action.help or "").replace("%%", "%").split())
            options.append(Option(tuple(action.option_strings), help_text, action.nargs != 0, choices))
        else:
            values += map(str, action.choices or ())
    yield Command(path, text, tuple(below), tuple(options), tuple(values))
    for name, parser_below in below.items():
        yield from commands_of(parser_below, (*path, name), texts.get(name, ""))


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """
    Args:
        parsers: by the words of the command, which begin with the program. A later one replaces what an earlier one
            has for the same words.
    """
    found: dict[tuple[str, ...], Command] = {}
    for words, parser in parsers.items():
        path = tuple(words.split())
        found |= {one.path: one for one in commands_of(parser, path, found[path].help if path in found else "")}
    commands = list(found.values())
    if shell == "fish":
        return _fish(commands)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _bash(commands)


def _quoted(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def _bash(commands: Sequence[Command]) -> str:
    programs = dict.fromkeys(one.path[0] for one in commands)
    deeper = "|".join(shlex.quote(" ".join(one.path)) for one in commands if len(one.path) > 1)
    values = []
    words = []
    for one in commands:
        path = " ".join(one.path)
        names = [name for option in one.options for name in option.names]
        words.append(f"    {shlex.quote(path)}) words={_quoted([*one.subcommands, *one.values, *names])} ;;")
        for option in one.options:
            if option.takes_value:
                after = "|".join(shlex.quote(f"{path} {name}") for name in option.names)
                values.append(f"    {after}) words={_quoted(option.values)}; is_value=1 ;;")
    return "\n".join(
        [
            "_bagua_complete() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words="" is_value="" i',
            '  local path="${COMP_WORDS[0]##*/}"',
            "  COMPREPLY=()",
            "  for ((i = 1; i < COMP_CWORD; i++)); do",
            '    [[ "${COMP_WORDS[i]}" == -- ]] && return',  # what follows is a command of its own
            '    case "$path ${COMP_WORDS[i]}" in',
            f'    {deeper}) path="$path ${{COMP_WORDS[i]}}" ;;',
            "    esac",
            "  done",
            '  case "$path $before" in',
            *values,
            "  esac",
            '  [[ -n "$is_value" ]] || case "$path" in',
            *words,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            # What is not known is a file.
            f"complete -o default -F _bagua_complete {' '.join(programs)}",
            "",
        ]
    )


def _fish(commands: Sequence[Command]) -> str:
    by_path = {one.path: one for one in commands}
    lines = []
    for one in commands:
        program, *below = one.path
        seen = [f"__fish_seen_subcommand_from {name}" for name in below]
        where = "; and ".join(seen)
        for name in one.subcommands:
            others = f"not __fish_seen_subcommand_from {' '.join(one.subcommands)}"
            text = by_path[(*one.path, name)].help
            lines.append(_fish_line(program, "; and ".join([*seen, others]), "-f", f"-a {name}", text=text))
        if one.values:
            lines.append(_fish_line(program, where, "-f", f"-a {_quoted(one.values)}"))
        for option in one.options:
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
            value = ["-r" if not option.values else f"-x -a {_quoted(option.values)}"] if option.takes_value else []
            lines.append(_fish_line(program, where, *names, *value, text=option.help))
    return "\n".join([*lines, ""])


def _fish_line(program: str, where: str, *words: str, text: str = "") -> str:
    condition = [f"-n {shlex.quote(where)}"] if where else []
    description = ["-d '" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"] if text else []
    return " ".join([f"complete -c {program}", *condition, *words, *description])
