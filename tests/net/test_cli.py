"""`bagua-net` itself: help, version, bad usage, and the list of knobs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
from support.fresh_process import RunCommand

import bagua

_SUBCOMMANDS = ("run", "env", "enable", "disable", "doctor", "test", "completion", "settings")


def test_version(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "--version"], environment)
    assert result.returncode == 0
    assert result.stdout == f"bagua-net {importlib.metadata.version('bagua')}\n"
    assert bagua.__version__ == importlib.metadata.version("bagua")


def test_help_names_every_subcommand(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "--help"], environment)
    assert result.returncode == 0
    for subcommand in _SUBCOMMANDS:
        assert f"\n    {subcommand}" in result.stdout
    assert 'eval "$(bagua-net env)"' in result.stdout


@pytest.mark.parametrize("subcommand", _SUBCOMMANDS)
def test_help_of_each(subcommand: str, run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, subcommand, "--help"], environment)
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: bagua-net {subcommand}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["doctr"], "unknown command 'doctr'; did you mean doctor?"),
        (["doctor", "--xml"], "bagua-net doctor: error: unknown argument '--xml'; `bagua-net doctor --help`"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["enable", "extra"], "usage: bagua-net enable "),
        (["bench", "--quik"], "bagua-net-bench"),
        (["stats", "--pid", "abc"], "'abc' is not an integer; give one in 1..4194304"),
        (["top", "--json", "--endpoints", "foo"], "'foo' names no port; write HOST:PORT"),
        (["blame", "--endpoints", "foo"], "'foo' names no port; write HOST:PORT"),
        (["env", "--shell", "tcsh"], "invalid choice: 'tcsh'"),
    ],
)
def test_bad_usage(
    arguments: list[str], message: str, run_command: RunCommand, bagua_net: Path, environment: dict[str, str]
) -> None:
    result = run_command([bagua_net, *arguments], environment)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_as_a_module(run_command: RunCommand, environment: dict[str, str]) -> None:
    result = run_command([sys.executable, "-m", "bagua.cli.net", "--version"], environment)
    assert result.returncode == 0
    assert result.stdout.startswith("bagua-net ")


def test_knobs_as_text_and_json(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    text = run_command([bagua_net, "knobs"], environment).stdout
    knobs = json.loads(run_command([bagua_net, "knobs", "--json"], environment).stdout)
    assert {"ENABLE_BAGUA_NET", "BAGUA_NET_REQUIRED", "BAGUA_NET_NSTREAMS"} <= {knob["name"] for knob in knobs}
    for knob in knobs:
        assert set(knob) == {"name", "type", "default_value", "range", "unit", "meaning"}
        assert f"{knob['name']}\n    {knob['type']}, default {knob['default_value']}, range {knob['range']}" in text


def test_knobs_without_the_compiled_part(
    run_command: RunCommand, environment: dict[str, str], without_library: dict[str, str]
) -> None:
    result = run_command([sys.executable, "-S", "-m", "bagua.cli.net", "knobs"], environment | without_library)
    assert result.returncode == 1
    assert result.stderr.startswith("bagua-net knobs: bagua.net._core cannot be imported (")
    assert "; install the package with `pip install .`" in result.stderr


def test_a_reader_that_goes_away(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    """As with `bagua-net knobs | head -1`."""
    script = f"'{bagua_net}' knobs | true; exit ${{PIPESTATUS[0]}}"
    result = run_command(["bash", "-c", script], environment)
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr


def test_the_command_line_loads_no_torch(run_command: RunCommand, environment: dict[str, str]) -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom bagua.cli.net import main\nassert main(['env']) == 0\n"
    result = run_command([sys.executable, "-c", script], environment)
    assert result.returncode == 0, result.stderr
    assert os.linesep.join(line.split("=")[0] for line in result.stdout.splitlines()).startswith("export ")
