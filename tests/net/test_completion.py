"""`bagua-net completion`: the script, in a real bash, and what it is made from."""

from __future__ import annotations

import argparse
import subprocess
from functools import cache

import pytest

from bagua.cli.net import main, make_parser
from bagua.cli.net_completion import SHELLS, script


@cache
def completion(shell: str) -> str:
    parsers = {"bagua-net": make_parser()[0]}
    return script(shell, parsers)


@pytest.fixture
def complete(capsys: pytest.CaptureFixture[str]) -> object:
    assert main(["completion", "bash"]) == 0
    text = capsys.readouterr().out

    def run(*words: str) -> list[str]:
        """What bash offers for the last word."""
        call = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _bagua_complete; printf "%s\\n" "${COMPREPLY[@]}"'
        shell = ["bash", "--norc", "-c", f"{text}\n{call}", "bash", *words]
        done = subprocess.run(shell, capture_output=True, text=True, timeout=30, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return run


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["bagua-net", "do"], ["doctor"]),
        (["bagua-net", "compl"], ["completion"]),
        (["bagua-net", "--v"], ["--version"]),
        (["bagua-net", "compare", "--un"], ["--unit"]),
        (["bagua-net", "compare", "--unit", ""], ["s", "ms", "us", "it/s"]),
        (["bagua-net", "compare", "--output-dir", ""], []),  # files, which bash knows itself
        (["bagua-net", "compare", "--json", "--roun"], ["--rounds"]),
        (["bagua-net", "run", "--", "torchrun", "--v"], []),  # the options of another command
        (["bagua-net", "completion", ""], ["bash", "zsh", "fish", "-h", "--help"]),
        (["bagua-net", "bench", "--qui"], ["--quick"]),
        (["/opt/bin/bagua-net-bench", "--qui"], ["--quick"]),
        (["bagua", "tune", "r"], ["report"]),
        (["bagua", "tune", "report", "--js"], ["--json"]),
    ],
)
def test_bash(words: list[str], offered: list[str], complete: object) -> None:
    assert callable(complete)
    assert complete(*words) == offered


@pytest.mark.parametrize("shell", SHELLS)
def test_all_subcommands_are_in_every_script(shell: str) -> None:
    text = completion(shell)
    for name in make_parser()[1].choices:
        assert name in text


def test_fish_gets_descriptions_and_values() -> None:
    parser = argparse.ArgumentParser()
    below = parser.add_subparsers()
    one = below.add_parser("one", help="the user's first")
    one.add_argument("--kind", choices=("a", "b"), help="of it")
    one.add_argument("--file", help="to read")
    one.add_argument("--secret", help=argparse.SUPPRESS)
    lines = script("fish", {"prog": parser}).splitlines()
    assert "complete -c prog -n 'not __fish_seen_subcommand_from one' -f -a one -d 'the user\\'s first'" in lines
    assert "complete -c prog -n '__fish_seen_subcommand_from one' -l kind -x -a 'a b' -d 'of it'" in lines
    assert "complete -c prog -n '__fish_seen_subcommand_from one' -l file -r -d 'to read'" in lines
    assert not any("secret" in line for line in lines)
