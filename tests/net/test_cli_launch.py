"""The ways to switch the plugin on besides ENABLE_BAGUA_NET: `bagua-net run`, `env`, `enable` and `disable`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.fresh_process import TIMEOUT_S, RunCommand, RunNet

import bagua.net
from bagua.cli import net_run
from bagua.cli.net import main
from bagua.net import nccl_config_file

_SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


@pytest.fixture
def library() -> Path:
    return bagua.net.library_path()


@pytest.fixture
def file(environment: dict[str, str]) -> Path:
    return Path(environment["HOME"], ".nccl.conf")


@pytest.fixture
def line(library: Path) -> str:
    return f"NCCL_NET_PLUGIN={library}"


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [["--"], []])
def test_the_command_gets_the_variables(
    separator: list[str], net: RunNet, environment: dict[str, str], library: Path
) -> None:
    before = {"LD_LIBRARY_PATH": "/some/where", "NCCL_DEBUG": "INFO"}
    result = net("run", *separator, sys.executable, "-S", "-c", _SHOW, "--by-name", "--", "-x", **before)
    assert result.returncode == 0, result.stderr
    variables, arguments = json.loads(result.stdout)
    assert arguments == ["--by-name", "--", "-x"], "they are the command's, not ours"
    ours = {
        "NCCL_NET_PLUGIN": str(library),
        "ENABLE_BAGUA_NET": "1",
        "LD_LIBRARY_PATH": f"{library.parent}:/some/where",
    }
    # Python adds LC_CTYPE where the locale is C: to the command's variables, or to those of these tests already.
    assert {**variables, "LC_CTYPE": ""} == {**environment, **before, **ours, "LC_CTYPE": ""}


def test_by_name(net: RunNet, library: Path) -> None:
    """Also where ENABLE_BAGUA_NET=1 makes the command's own Python look again: a path would spoil it for NCCL 2.20."""
    script = f"import bagua; {_SHOW}"
    result = net("run", "--by-name", "--", sys.executable, "-c", script, ENABLE_BAGUA_NET="1")
    assert result.returncode == 0, result.stderr
    variables, _ = json.loads(result.stdout)
    assert "NCCL_NET_PLUGIN" not in variables
    assert variables["LD_LIBRARY_PATH"] == str(library.parent)


def test_the_loader_finds_the_default_name(net: RunNet) -> None:
    """NCCL 2.28 and 2.29 open it when they have forgotten NCCL_NET_PLUGIN."""
    script = "import ctypes; ctypes.c_char_p.in_dll(ctypes.CDLL('libnccl-net.so'), 'ncclNetPlugin_v11')"
    result = net("run", "--", sys.executable, "-S", "-c", script)
    assert result.returncode == 0, result.stderr


def test_it_becomes_the_command(bagua_net: Path, environment: dict[str, str]) -> None:
    """The same process: signals reach the command, its exit code is that of the command, and no parent has to pass
    anything on."""
    command = [str(bagua_net), "run", "--", "sh", "-c", "echo $$; exec sleep 600"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == -signal.SIGTERM


def test_no_signal_stays_ignored(net: RunNet, run_command: RunCommand, environment: dict[str, str]) -> None:
    """Python ignores SIGPIPE; `bagua-net run -- CMD | head` must end all the same."""
    ask = ["grep", "SigIgn", "/proc/self/status"]
    plain, ours = run_command(ask, environment).stdout, net("run", "--", *ask).stdout
    python_ignores = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert int(ours.split()[1], 16) == int(plain.split()[1], 16) & ~python_ignores


def test_a_command_that_cannot_be_run(net: RunNet, tmp_path: Path) -> None:
    result = net("run", "--", "no-such-command")
    assert (result.returncode, "no-such-command: no such command" in result.stderr) == (127, True)
    (tmp_path / "text").write_text("x")
    result = net("run", "--", tmp_path / "text")
    assert (result.returncode, "cannot be run (Permission denied)" in result.stderr) == (126, True)


def test_the_users_own_setting_is_said_once(net: RunNet) -> None:
    """`run` says it, and the Python that it becomes does not repeat it."""
    result = net("run", "--", sys.executable, "-c", "import bagua", ENABLE_BAGUA_NET="1", NCCL_NET="Socket")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("NCCL_NET=Socket (set in the environment) is kept") == 1


@pytest.mark.parametrize("subcommand", [["run", "--", "env"], ["env"]])
def test_switched_off(subcommand: list[str], net: RunNet) -> None:
    result = net(*subcommand, ENABLE_BAGUA_NET="0")
    assert result.returncode == 0
    assert "NCCL_NET_PLUGIN" not in result.stdout
    assert "LD_LIBRARY_PATH" not in result.stdout
    assert "Bagua-Net: ENABLE_BAGUA_NET=0 is set: NCCL uses its own transport\nTo use" in result.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ENABLE_BAGUA_NET": "maybe"}, "ENABLE_BAGUA_NET=maybe: must be 1, true, yes or on, or else 0"),
        ({"BAGUA_NET_NSTREAMS": "lots"}, "BAGUA_NET_NSTREAMS=lots: must be an integer from 1 to 64"),
        ({"BAGUA_NET_REQUIRED": "1", "NCCL_NET": "Socket"}, "BAGUA_NET_REQUIRED=1, but NCCL_NET=Socket"),
        ({"BAGUA_NET_SECRET_FILE": "/dev/null"}, "BAGUA_NET_SECRET_FILE=/dev/null: "),
    ],
)
def test_variables_with_which_no_job_starts(variables: dict[str, str], message: str, net: RunNet) -> None:
    for subcommand in (["run", "--", "echo", "ran"], ["env"]):
        result = net(*subcommand, **variables)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"bagua-net {subcommand[0]}: {message}" in result.stderr


def test_a_secret_file_may_be_on_other_hosts_alone(net: RunNet) -> None:
    """Of a login node whose jobs run elsewhere."""
    for subcommand in (["run", "--", "echo", "ran"], ["env"]):
        result = net(*subcommand, BAGUA_NET_SECRET_FILE="nosuch")
        assert (result.returncode, bool(result.stdout)) == (0, True)
        assert "BAGUA_NET_SECRET_FILE=nosuch: this host has no such file. Ranks that start here" in result.stderr


def test_misspelt_settings_are_named(net: RunNet) -> None:
    own = {"BAGUA_NET_NSTREAM": "4", "BAGUA_LOGLEVEL": "info", "BAGUA_REPORT_METRICS": "1", "BAGUA_LOG_LEVEL": "info"}
    result = net("run", "--", "true", **own, BAGUA_IS_OUTPUT_AUTOTUNE_LOG="0")
    assert result.returncode == 0
    assert "BAGUA_NET_NSTREAM is not a Bagua-Net setting" in result.stderr
    assert "Did you mean BAGUA_NET_NSTREAMS?" in result.stderr
    assert "Did you mean BAGUA_LOG_LEVEL?" in result.stderr
    assert "BAGUA_REPORT_METRICS has no effect in this version." in result.stderr
    assert len(result.stderr.splitlines()) == 3


def test_commands_without_the_library_say_how_to_install_it(
    run_command: RunCommand, environment: dict[str, str], without_library: dict[str, str], file: Path
) -> None:
    for words in (["run", "--", "echo", "ran"], ["env"], ["enable"], ["knobs"]):
        command = [sys.executable, "-S", "-m", "bagua.cli.net", *words]
        result = run_command(command, environment | without_library)
        assert (result.returncode, result.stdout) == (1, "")
        lacking = (
            "bagua.net._core cannot be imported (" if words == ["knobs"] else "the NCCL network plugin libnccl-net.so"
        )
        assert result.stderr.startswith(f"bagua-net {words[0]}: {lacking}")
        assert "install the package with `pip install .`" in result.stderr
    assert not file.exists()


def test_launchers_in_python_get_what_run_sets(environment: dict[str, str], library: Path) -> None:
    expected = {"NCCL_NET_PLUGIN": str(library), "ENABLE_BAGUA_NET": "1", "LD_LIBRARY_PATH": str(library.parent)}
    assert bagua.net.environment(environment) == expected
    assert "NCCL_NET_PLUGIN" not in bagua.net.environment(environment, by_name=True)
    assert "NCCL_NET_PLUGIN" not in os.environ


# --- env -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", [name for name in ("sh", "bash", "dash", "zsh") if shutil.which(name)])
def test_eval_in_real_shells(
    shell: str, run_command: RunCommand, bagua_net: Path, environment: dict[str, str], library: Path
) -> None:
    """The second time nothing is left to change."""
    script = f"""eval "$('{bagua_net}' env)" && '{sys.executable}' -S -c '{_SHOW}' && '{bagua_net}' env"""
    result = run_command([shell, "-c", script], {**environment, "LD_LIBRARY_PATH": "/some where/with 'quotes'"})
    assert (result.returncode, result.stderr) == (0, "")
    shown, *more = result.stdout.splitlines()
    variables, _ = json.loads(shown)
    assert variables["NCCL_NET_PLUGIN"] == str(library)
    assert variables["LD_LIBRARY_PATH"] == f"{library.parent}:/some where/with 'quotes'"
    assert variables["ENABLE_BAGUA_NET"] == "1"
    assert more == []


@pytest.mark.parametrize(
    ("shell", "line"),
    [("sh", "export X='a b$c'\"'\"'d\\e'\n"), ("fish", "set -gx X 'a b$c\\'d\\\\e'\n")],
)
def test_quoting(shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(net_run, "launch_changes", lambda **_: ({}, {"X": "a b$c'd\\e"}))
    assert main(["env", "--shell", shell]) == 0
    assert capsys.readouterr().out == line


def test_env_loads_no_torch(run_command: RunCommand, environment: dict[str, str]) -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom bagua.cli.net import main\nassert main(['env']) == 0\n"
    result = run_command([sys.executable, "-c", script], environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("export ")


# --- enable and disable ----------------------------------------------------------------------------------------------


def test_enable_and_back(
    net: RunNet, run_command: RunCommand, environment: dict[str, str], file: Path, line: str
) -> None:
    file.write_text("NCCL_DEBUG=WARN\n")
    result = net("enable")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{file}: {line}\n", "")
    written = file.read_text()
    assert written.endswith(f"\n{line}\nNCCL_DEBUG=WARN\n")
    assert net("enable").stdout == f"{file}: {line} (was there already)\n"
    assert file.read_text() == written
    # ENABLE_BAGUA_NET=1 does not take our own line for somebody else's.
    script = "import bagua.net; print(bagua.net.activate().state.value)"
    result = run_command([sys.executable, "-c", script], {**environment, "ENABLE_BAGUA_NET": "1"})
    assert (result.stdout, result.stderr) == ("active\n", "")
    assert net("disable").stdout == f"{file}: restored as it was before `bagua-net enable`\n"
    assert file.read_text() == "NCCL_DEBUG=WARN\n"
    assert net("disable").stdout == f"{file}: nothing of ours to remove\n"


def test_a_line_of_the_users_own(net: RunNet, file: Path, line: str) -> None:
    file.write_text("NCCL_NET_PLUGIN=ofi\n")
    result = net("enable")
    assert result.returncode == 1
    assert result.stderr.startswith(f"bagua-net enable: {file} sets NCCL_NET_PLUGIN=ofi already\nRemove that line, or")
    assert net("enable", "--force").returncode == 0
    assert line in file.read_text().splitlines()
    result = net("disable")
    assert file.read_text() == "NCCL_NET_PLUGIN=ofi\n"
    assert result.stderr == "bagua-net disable: your own line NCCL_NET_PLUGIN=ofi was left there\n"


def test_what_keeps_nccl_from_the_line(net: RunNet, file: Path) -> None:
    file.write_text("NCCL_NET=Socket\n")
    result = net("enable", NCCL_NET_PLUGIN="ofi", NCCL_NET="IB")
    assert result.returncode == 0
    warnings = [one.removeprefix("bagua-net enable: warning: ") for one in result.stderr.splitlines()]
    assert [one.partition(" in ")[0] for one in warnings] == ["NCCL_NET=Socket", "NCCL_NET_PLUGIN=ofi", "NCCL_NET=IB"]


def test_files_that_cannot_be_written(net: RunNet, environment: dict[str, str], file: Path) -> None:
    """/proc refuses new files, to root too."""
    result = net("enable", NCCL_CONF_FILE="/proc/nccl.conf")
    assert result.returncode == 1
    refusal = "bagua-net enable: /proc/nccl.conf cannot be written: /proc takes no new files\n"
    assert result.stderr == f"{refusal}Name another in NCCL_CONF_FILE.\n"
    assert not file.exists()
    del environment["HOME"]
    for subcommand in ("enable", "disable"):
        result = net(subcommand)
        assert result.returncode == 1
        assert f"bagua-net {subcommand}: HOME is not set" in result.stderr


def test_the_systems_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: the real /etc/nccl.conf is not for a test to change. The user's own takes precedence."""
    system, own = tmp_path / "etc.conf", tmp_path / ".nccl.conf"
    monkeypatch.setattr(nccl_config_file, "SYSTEM_FILE", system)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    assert main(["enable", "--system"]) == 0
    assert line in system.read_text()
    assert not own.exists()
    assert main(["disable", "--system"]) == 0
    assert not system.exists()
    own.write_text("NCCL_NET_PLUGIN=ofi\n")
    assert main(["enable", "--system"]) == 0
    assert f"{own} sets NCCL_NET_PLUGIN=ofi, which takes precedence over {system}; remove it" in capsys.readouterr().err
