"""`bagua-net run -- CMD`: the command's variables, and that everything else is the command's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.fresh_process import TIMEOUT_S, RunCommand

import bagua.net

_SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


@pytest.fixture
def library() -> Path:
    return bagua.net.library_path()


@pytest.mark.parametrize("separator", [["--"], []])
def test_the_command_gets_the_variables(
    separator: list[str],
    run_command: RunCommand,
    bagua_net: Path,
    environment: dict[str, str],
    library: Path,
) -> None:
    before = {**environment, "LD_LIBRARY_PATH": "/some/where", "NCCL_DEBUG": "INFO"}
    command = [sys.executable, "-S", "-c", _SHOW, "--by-name", "--", "-x"]
    result = run_command([bagua_net, "run", *separator, *command], before)
    assert result.returncode == 0, result.stderr
    variables, arguments = json.loads(result.stdout)
    assert arguments == ["--by-name", "--", "-x"], "they are the command's, not ours"
    assert variables.pop("NCCL_NET_PLUGIN") == str(library)
    assert variables.pop("ENABLE_BAGUA_NET") == "1"
    assert variables.pop("LD_LIBRARY_PATH") == f"{library.parent}:/some/where"
    del before["LD_LIBRARY_PATH"]
    # Python adds LC_CTYPE where the locale is C: to the command's variables, or to those of these tests already.
    variables.pop("LC_CTYPE", None)
    before.pop("LC_CTYPE", None)
    assert variables == before


def test_by_name(run_command: RunCommand, bagua_net: Path, environment: dict[str, str], library: Path) -> None:
    """Also where ENABLE_BAGUA_NET=1 makes the command's own Python look again: a path would spoil it for NCCL 2.20."""
    script = "import bagua, json, os; print(json.dumps(dict(os.environ)))"
    asked = {**environment, "ENABLE_BAGUA_NET": "1"}
    result = run_command([bagua_net, "run", "--by-name", "--", sys.executable, "-c", script], asked)
    assert result.returncode == 0, result.stderr
    variables = json.loads(result.stdout)
    assert "NCCL_NET_PLUGIN" not in variables
    assert variables["LD_LIBRARY_PATH"] == str(library.parent)


def test_the_loader_finds_the_default_name(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str]
) -> None:
    """NCCL 2.28 and 2.29 open it when they have forgotten NCCL_NET_PLUGIN."""
    script = "import ctypes; ctypes.c_char_p.in_dll(ctypes.CDLL('libnccl-net.so'), 'ncclNetPlugin_v11')"
    result = run_command([bagua_net, "run", "--", sys.executable, "-S", "-c", script], environment)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_commands(
    code: int, run_command: RunCommand, bagua_net: Path, environment: dict[str, str]
) -> None:
    assert run_command([bagua_net, "run", "--", "sh", "-c", f"exit {code}"], environment).returncode == code


def test_it_becomes_the_command(bagua_net: Path, environment: dict[str, str]) -> None:
    """The same process: signals reach the command, and no parent has to pass anything on."""
    command = [str(bagua_net), "run", "--", "sh", "-c", "echo $$; exec sleep 600"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_no_signal_stays_ignored(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    """Python ignores SIGPIPE; `bagua-net run -- CMD | head` must end all the same."""
    plain = run_command(["grep", "SigIgn", "/proc/self/status"], environment).stdout
    ours = run_command([bagua_net, "run", "--", "grep", "SigIgn", "/proc/self/status"], environment).stdout
    pipe = 1 << (signal.SIGPIPE - 1)
    assert int(ours.split()[1], 16) == int(plain.split()[1], 16) & ~pipe & ~(1 << (signal.SIGXFSZ - 1))


@pytest.mark.parametrize("arguments", [[], ["--"], ["--by-name"], ["--by-name", "--"], ["--", ""]])
def test_no_command(
    arguments: list[str], run_command: RunCommand, bagua_net: Path, environment: dict[str, str]
) -> None:
    result = run_command([bagua_net, "run", *arguments], environment)
    assert result.returncode == 2
    assert result.stderr.startswith("bagua-net run: no command given; write it after the options: bagua-net run -- ")


def test_an_unknown_option(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "run", "--nproc=2", "--", "true"], environment)
    assert result.returncode == 2
    assert "--nproc=2" in result.stderr


def test_no_such_command(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "run", "--", "no-such-command"], environment)
    assert result.returncode == 127
    assert result.stderr == "bagua-net run: no-such-command: no such command; check its name and PATH\n"


def test_not_executable(run_command: RunCommand, bagua_net: Path, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("x")
    result = run_command([bagua_net, "run", "--", tmp_path / "text"], environment)
    assert result.returncode == 126
    assert "cannot be run (Permission denied); check that it is an executable file" in result.stderr


def test_switched_off(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "run", "--", "sh", "-c", "env"], {**environment, "ENABLE_BAGUA_NET": "0"})
    assert result.returncode == 0
    assert "NCCL_NET_PLUGIN" not in result.stdout
    assert "LD_LIBRARY_PATH" not in result.stdout
    assert "Bagua-Net: ENABLE_BAGUA_NET=0 is set: NCCL uses its own transport\nTo use" in result.stderr


def test_the_users_own_setting_is_said_once(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str]
) -> None:
    """`run` says it, and the Python that it becomes does not repeat it."""
    own = {**environment, "ENABLE_BAGUA_NET": "1", "NCCL_NET": "Socket"}
    result = run_command([bagua_net, "run", "--", sys.executable, "-c", "import bagua"], own)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("NCCL_NET=Socket (set in the environment) is kept") == 1


def test_a_bad_value(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "run", "--", "true"], {**environment, "ENABLE_BAGUA_NET": "maybe"})
    assert result.returncode == 1
    assert result.stderr.startswith("bagua-net run: ENABLE_BAGUA_NET=maybe: must be 1, true, yes or on, or else 0")


@pytest.mark.parametrize("subcommand", [["run", "--", "echo", "ran"], ["env"]])
def test_a_setting_that_keeps_the_plugin_from_starting(
    subcommand: list[str], run_command: RunCommand, bagua_net: Path, environment: dict[str, str]
) -> None:
    result = run_command([bagua_net, *subcommand], {**environment, "BAGUA_NET_NSTREAMS": "lots"})
    assert (result.returncode, result.stdout) == (1, "")
    first, remedy = result.stderr.splitlines()
    assert "BAGUA_NET_NSTREAMS=lots: must be an integer from 1 to 64" in first
    assert remedy.startswith("Correct BAGUA_NET_NSTREAMS or unset it.")


def test_misspelt_settings_are_named(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    own = {"BAGUA_NET_NSTREAM": "4", "BAGUA_LOGLEVEL": "info", "BAGUA_REPORT_METRICS": "1", "BAGUA_LOG_LEVEL": "info"}
    result = run_command([bagua_net, "run", "--", "true"], environment | own)
    assert result.returncode == 0
    assert "BAGUA_NET_NSTREAM is not a Bagua-Net setting" in result.stderr
    assert "Did you mean BAGUA_NET_NSTREAMS?" in result.stderr
    assert "Did you mean BAGUA_LOG_LEVEL?" in result.stderr
    assert "BAGUA_REPORT_METRICS has no effect in this version." in result.stderr
    assert len(result.stderr.splitlines()) == 3


def test_required_and_another_transport(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    own = {**environment, "BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}
    result = run_command([bagua_net, "run", "--", "echo", "ran"], own)
    assert result.returncode == 1
    assert result.stderr.startswith("bagua-net run: BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket")
    assert "ran" not in result.stdout


def test_a_missing_library(
    run_command: RunCommand, environment: dict[str, str], without_library: dict[str, str]
) -> None:
    command = [sys.executable, "-S", "-m", "bagua.cli.net", "run", "--", "echo", "ran"]
    result = run_command(command, environment | without_library)
    assert result.returncode == 1
    assert result.stderr.startswith("bagua-net run: the NCCL network plugin libnccl-net.so is not installed (sought: ")
    assert result.stdout == ""


def test_environment_is_what_run_sets(environment: dict[str, str], library: Path) -> None:
    """The same from Python, for launchers."""
    expected = {"NCCL_NET_PLUGIN": str(library), "ENABLE_BAGUA_NET": "1", "LD_LIBRARY_PATH": str(library.parent)}
    assert bagua.net.environment(environment) == expected
    assert "NCCL_NET_PLUGIN" not in bagua.net.environment(environment, by_name=True)
    assert "NCCL_NET_PLUGIN" not in os.environ
