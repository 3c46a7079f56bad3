"""`bagua-net env`, taken over by real shells."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.fresh_process import RunCommand

import bagua.net
from bagua.cli import net_env
from bagua.cli.net import main

_SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.mark.parametrize("shell", [name for name in ("sh", "bash", "dash", "zsh") if shutil.which(name)])
def test_eval(shell: str, run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    script = f"""eval "$('{bagua_net}' env)" && '{sys.executable}' -S -c '{_SHOW}'"""
    before = {**environment, "LD_LIBRARY_PATH": "/some where/with 'quotes'"}
    result = run_command([shell, "-c", script], before)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    variables = json.loads(result.stdout)
    library = bagua.net.library_path()
    assert variables["NCCL_NET_PLUGIN"] == str(library)
    assert variables["LD_LIBRARY_PATH"] == f"{library.parent}:/some where/with 'quotes'"
    assert variables["ENABLE_BAGUA_NET"] == "1"


def test_eval_twice_changes_nothing(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    script = f"""eval "$('{bagua_net}' env)"; '{bagua_net}' env"""
    result = run_command(["sh", "-c", script], environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_only_exports_on_stdout(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "env"], environment)
    names = [line.removeprefix("export ").partition("=")[0] for line in result.stdout.splitlines()]
    assert names == ["NCCL_NET_PLUGIN", "ENABLE_BAGUA_NET", "LD_LIBRARY_PATH"]
    for variables in ({"ENABLE_BAGUA_NET": "0"}, {"NCCL_NET": "Socket"}):
        result = run_command([bagua_net, "env"], environment | variables)
        assert result.returncode == 0
        assert result.stdout == ""
        assert result.stderr.startswith("Bagua-Net: ")


def test_by_name(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "env", "--by-name"], environment)
    assert "NCCL_NET_PLUGIN" not in result.stdout
    assert f"export LD_LIBRARY_PATH={bagua.net.library_path().parent}\n" in result.stdout


@pytest.mark.parametrize(
    ("shell", "line"),
    [("sh", "export X='a b$c'\"'\"'d\\e'\n"), ("fish", "set -gx X 'a b$c\\'d\\\\e'\n")],
)
def test_quoting(shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(net_env, "launch_changes", lambda **_: ({}, {"X": "a b$c'd\\e"}))
    assert main(["env", "--shell", shell]) == 0
    assert capsys.readouterr().out == line


def test_a_bad_value(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "env"], {**environment, "BAGUA_NET_REQUIRED": "2"})
    assert result.returncode != 0
    assert result.stdout == ""
    assert "BAGUA_NET_REQUIRED=2: must be 1, true, yes or on" in result.stderr


def test_a_missing_library(
    run_command: RunCommand, environment: dict[str, str], without_library: dict[str, str]
) -> None:
    result = run_command([sys.executable, "-S", "-m", "bagua.cli.net", "env"], environment | without_library)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "bagua-net env: the NCCL network plugin libnccl-net.so is not installed" in result.stderr
