"""`bagua-net enable` and `bagua-net disable`, with a home directory of the test's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.fresh_process import RunCommand

import bagua.net
from bagua.cli.net import main
from bagua.net import nccl_config_file


@pytest.fixture
def file(environment: dict[str, str]) -> Path:
    return Path(environment["HOME"], ".nccl.conf")


@pytest.fixture
def line() -> str:
    return f"NCCL_NET_PLUGIN={bagua.net.library_path()}"


def test_there_and_back(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str], file: Path, line: str
) -> None:
    file.write_text("NCCL_DEBUG=WARN\n")
    result = run_command([bagua_net, "enable"], environment)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{file}: {line}\n", "")
    written = file.read_text()
    assert written.endswith(f"\n{line}\nNCCL_DEBUG=WARN\n")
    assert written.startswith("# bagua-net: ")

    result = run_command([bagua_net, "enable"], environment)
    assert (result.returncode, result.stdout) == (0, f"{file}: {line} (was there already)\n")
    assert file.read_text() == written

    result = run_command([bagua_net, "disable"], environment)
    assert (result.returncode, result.stdout) == (0, f"{file}: restored as it was before `bagua-net enable`\n")
    assert file.read_text() == "NCCL_DEBUG=WARN\n"

    result = run_command([bagua_net, "disable"], environment)
    assert (result.returncode, result.stdout) == (0, f"{file}: nothing of ours to remove\n")


def test_a_job_needs_nothing_else(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    """ENABLE_BAGUA_NET=1 does not take our own line for somebody else's."""
    run_command([bagua_net, "enable"], environment)
    script = "import bagua.net; print(bagua.net.activate().state.value)"
    result = run_command([sys.executable, "-c", script], {**environment, "ENABLE_BAGUA_NET": "1"})
    assert (result.stdout, result.stderr) == ("active\n", "")


def test_nccl_conf_file(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str], file: Path, line: str, tmp_path: Path
) -> None:
    named = tmp_path / "named.conf"
    result = run_command([bagua_net, "enable"], {**environment, "NCCL_CONF_FILE": str(named)})
    assert result.returncode == 0
    assert line in named.read_text()
    assert not file.exists()


def test_a_line_of_the_users_own(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str], file: Path, line: str
) -> None:
    file.write_text("NCCL_NET_PLUGIN=ofi\n")
    result = run_command([bagua_net, "enable"], environment)
    assert result.returncode == 1
    assert result.stderr.startswith(f"bagua-net enable: {file} sets NCCL_NET_PLUGIN=ofi already\nRemove that line, or")
    assert file.read_text() == "NCCL_NET_PLUGIN=ofi\n"

    assert run_command([bagua_net, "enable", "--force"], environment).returncode == 0
    assert line in file.read_text().splitlines()
    result = run_command([bagua_net, "disable"], environment)
    assert file.read_text() == "NCCL_NET_PLUGIN=ofi\n"
    assert result.stderr == "bagua-net disable: your own line NCCL_NET_PLUGIN=ofi was left there\n"


def test_what_keeps_nccl_from_the_line(
    run_command: RunCommand, bagua_net: Path, environment: dict[str, str], file: Path
) -> None:
    file.write_text("NCCL_NET=Socket\n")
    own = {**environment, "NCCL_NET_PLUGIN": "ofi", "NCCL_NET": "IB"}
    result = run_command([bagua_net, "enable"], own)
    assert result.returncode == 0
    assert result.stderr.splitlines() == [
        f"bagua-net enable: warning: NCCL_NET=Socket in {file} keeps NCCL from using the plugin; remove that line",
        "bagua-net enable: warning: NCCL_NET_PLUGIN=ofi in the environment takes precedence over the file; unset it",
        "bagua-net enable: warning: NCCL_NET=IB in the environment keeps NCCL from using the plugin; unset it",
    ]


def test_no_home(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    del environment["HOME"]
    for subcommand in ("enable", "disable"):
        result = run_command([bagua_net, subcommand], environment)
        assert result.returncode == 1
        assert result.stderr == (
            f"bagua-net {subcommand}: HOME is not set, so there is no ~/.nccl.conf; set HOME or NCCL_CONF_FILE, or use "
            "--system\n"
        )


def test_no_such_directory(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    result = run_command([bagua_net, "enable"], {**environment, "NCCL_CONF_FILE": "/no/such/nccl.conf"})
    assert result.returncode == 1
    assert "/no/such/nccl.conf cannot be written (No such file or directory)\nCreate the directory" in result.stderr


def test_no_permission(run_command: RunCommand, bagua_net: Path, environment: dict[str, str]) -> None:
    """/proc refuses new files, to root too."""
    result = run_command([bagua_net, "enable"], {**environment, "NCCL_CONF_FILE": "/proc/nccl.conf"})
    assert result.returncode == 1
    assert result.stderr.startswith("bagua-net enable: /proc/nccl.conf cannot be written (")
    assert "NCCL_CONF_FILE" in result.stderr


def test_a_missing_library(
    run_command: RunCommand, environment: dict[str, str], without_library: dict[str, str], file: Path
) -> None:
    result = run_command([sys.executable, "-S", "-m", "bagua.cli.net", "enable"], environment | without_library)
    assert result.returncode == 1
    assert "bagua-net enable: the NCCL network plugin libnccl-net.so is not installed" in result.stderr
    assert not file.exists()


def test_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    """In this process: the real /etc/nccl.conf is not for a test to change."""
    system, home = tmp_path / "etc.conf", tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(nccl_config_file, "SYSTEM_FILE", system)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    assert main(["enable", "--system"]) == 0
    assert line in system.read_text()
    assert list(home.iterdir()) == []
    assert main(["disable", "--system"]) == 0
    assert not system.exists()


def test_the_users_file_wins_over_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = tmp_path / "etc.conf"
    monkeypatch.setattr(nccl_config_file, "SYSTEM_FILE", system)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    own = tmp_path / ".nccl.conf"
    own.write_text("NCCL_NET_PLUGIN=ofi\n")
    assert main(["enable", "--system"]) == 0
    assert f"{own} sets NCCL_NET_PLUGIN=ofi, which takes precedence over {system}; remove it" in capsys.readouterr().err
