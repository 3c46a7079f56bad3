"""`bagua-net compare` as a command. What it runs is a small program that leaves a log like NCCL's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.processes import is_alive, wait_until

from bagua.cli.net import main

TRAINING = """
    import os, sys
    network = "Socket" if os.environ["ENABLE_BAGUA_NET"] == "0" else "BaguaNet"
    log = os.environ["NCCL_DEBUG_FILE"].replace("%h", "host").replace("%p", str(os.getpid()))
    with open(log, "w") as file:
        print(f"host:1:1 [0] NCCL INFO Using network {network}", file=file)
        print(f"host:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{network}/0", file=file)
    step_ms = 20 if network == "Socket" else 16
    for step in range(12):
        print(f"step_time {900 if step < 4 else step_ms} ms", end="\\r" if step % 2 else "\\n")
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "BAGUA_NET_", "ENABLE_BAGUA_NET"))]:
        monkeypatch.delenv(name)
    # The machine of the test may have an RDMA network, about which the plugin would ask.
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")


@pytest.fixture
def training(tmp_path: Path) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAINING))
    return [sys.executable, "-S", str(script)]


def compare(*words: str) -> int:
    return main(["compare", *words])


def test_a_script_that_knows_nothing_of_bagua(training: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--rounds", "3", "--", *training) == 0
    output, progress = capsys.readouterr()
    lines = output.splitlines()
    assert lines[1].split() == ["NCCL's", "own", "network", "20", "20", "20", "20", "Socket"]
    assert lines[2].split() == ["Bagua-Net", "16", "16", "16", "16", "BaguaNet"]
    assert lines[-1] == "Bagua-Net is faster than NCCL's own network: 1.250x (spread 1.250..1.250 over 3 rounds)."
    assert "round 2, Bagua-Net: 16 ms (8 steps, " in progress


def test_the_page_shows_what_a_job_without_nccl_gets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "compare-a-job.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text("for step in range(9):\n    print(f'step {step}  loss 0.5      12.34 ms')\n")
    assert compare("--rounds", "3", "--", sys.executable, "-S", str(script)) == 0
    printed = capsys.readouterr().out
    assert [re.sub(r"\d\d\.\d\d", "12.34", line) for line in shown.splitlines()] == printed.splitlines()


def test_the_report_as_json_and_the_kept_logs(
    training: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    of_the_user = kept / "round1-a" / "notes" / "readme.txt"
    of_the_user.parent.mkdir(parents=True)
    of_the_user.write_text("keep me")
    (kept / "round1-a" / "nccl.host.1.log").write_text("of an earlier run")
    settings = ["--with", "plugin X=1", "--with", "no-plugin X=2"]
    assert compare("--json", "--rounds", "1", *settings, "--output-dir", str(kept), *training) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "too few rounds"
    assert report["speedup"]["median"] == pytest.approx(0.8)
    assert [one["name"] for one in report["settings"]] == ["plugin X=1", "no-plugin X=2"]
    run = report["settings"][1]["runs"][0]
    assert (run["step_seconds"], run["steps"], run["networks"]) == (0.02, 8, ["Socket"])
    assert "step_time 900 ms" in (kept / "round1-a" / "output.txt").read_text()
    assert len(list((kept / "round1-b").glob("nccl.*.log"))) == 1
    assert not (kept / "round1-a" / "nccl.host.1.log").exists()
    assert of_the_user.read_text() == "keep me"


def test_logs_of_other_hosts_are_read_from_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    """NCCL logs to its standard output where the folder of the log does not exist."""
    script = """
        [ $ENABLE_BAGUA_NET = 0 ] && network=Socket || network=BaguaNet
        echo "node1:7:7 [0] NCCL INFO Using network $network"
        for step in 1 2 3; do echo "10 ms/step"; done
    """
    assert compare("--rounds", "3", "--", "sh", "-c", script) == 0
    output = capsys.readouterr().out
    assert [line.split()[-1] for line in output.splitlines()[1:3]] == ["Socket", "BaguaNet"]
    assert "No difference between Bagua-Net and NCCL's own network (spread 1.000..1.000 over 3 rounds)." in output


def test_a_first_round_without_nccl_is_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "gloo.py"
    script.write_text('for step in range(12):\n    print("step_time 20 ms")\n')
    command = ["--", sys.executable, "-S", str(script)]
    assert compare("--rounds", "3", *command) == 0
    output, progress = capsys.readouterr()
    assert "NCCL was not used: no plugin can change this job." in output
    assert "1 of 3 rounds ran: more cannot compare anything; --keep-going runs all" in " ".join(output.split())
    assert "round 2" not in progress
    assert compare("--rounds", "3", "--keep-going", *command) == 0
    assert "round 3" in capsys.readouterr().err
    # Other variables than the plugin's may matter to a job without NCCL.
    assert compare("--rounds", "3", "--with", "X=1", "--with", "X=2", *command) == 0
    assert "round 3" in capsys.readouterr().err


def test_a_command_that_fails_shows_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--", "/no/such/command") == 1
    assert "'/no/such/command' cannot be started: No such file or directory" in capsys.readouterr().err
    assert compare("--", "sh", "-c", "echo first; echo last >&2; exit 3") == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert "NCCL's own network, round 1: the command failed (exit code 3)\nIt ended with:\n  first\n  last" in errors


def test_of_torchrun_only_what_ranks_said_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    stars, banner = "*" * 41, "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"
    log = "E1127 08:23:44 5298 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 3)"
    prefix = "W1127 08:23:40 5298 torch/distributed/run.py:803] "
    lines = [prefix, prefix + stars, prefix + banner, stars, banner, "boom", log, "Traceback"]
    assert compare("--", "sh", "-c", "\n".join(f"echo '{line}'" for line in lines) + "\nexit 3") == 1
    assert "It ended with:\n  boom\nRun it without" in capsys.readouterr().err


def test_a_command_that_does_not_end_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process that it started, in a session of its own, too."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 60' & sleep 60"
    assert compare("--time-limit", "1", "--", "sh", "-c", script) == 1
    assert "not done after 1 s" in capsys.readouterr().err
    wait_until(lambda: not is_alive(int(pid.read_text())), "the end of what it started")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command given"),
        (["--", "-x"], "-x is neither an option of `compare` nor a command"),
        (["--with", "X=1", "--", "true"], "--with is given once"),
        (["--with", "X=1", "--with", "X=1", "--", "true"], "both settings are 'X=1'"),
        (["--with", "X=1", "--with", "bagua", "--", "true"], "--with"),
        (["--with", "X=1", "--with", "'X=1", "--", "true"], "--with"),
        (["--unit", "ms", "--", "true"], "--unit ms is for --pattern"),
        (["--pattern", "(", "--", "true"], "not a regular expression"),
        (["--pattern", "x", "--", "true"], "0 groups"),
        (["--pattern", "(a)(b)", "--", "true"], "2 groups"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*words) == 2
    assert message in capsys.readouterr().err


def test_step_times_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--pattern", "x(y)", "--", "sh", "-c", "echo one; echo two") == 1
    errors = capsys.readouterr().err
    assert "no step times found in 2 lines" in errors
    assert "two" in errors
    assert compare("--warmup", "5", "--", "sh", "-c", "echo '1 ms/step'; echo '1 ms/step'") == 1
    assert "round 1: too few steps: 2 found, and --warmup 5 drops them all" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_and_reports_what_is_there(tmp_path: Path, bagua_net: Path) -> None:
    """From the second round on, the command waits."""
    script = f"""
        i=$(cat {tmp_path}/count 2>/dev/null || echo 0); echo $((i + 1)) > {tmp_path}/count
        for step in 1 2 3 4; do echo "step_time 10 ms"; done
        if [ $i -ge 2 ]; then echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; exec sleep 60; fi
    """
    process = subprocess.Popen(
        [bagua_net, "compare", "--keep-going", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until((tmp_path / "pid").exists, "the third run")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert "Interrupted: this is of the runs that had ended." in output
    assert "NCCL was not used: no plugin can change this job." in output
