"""`bagua-net test` with real launchers and ranks on this machine, and with what can go wrong before they meet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
from support.fresh_process import RunNet
from support.ports import free_port
from support.processes import is_alive, wait_until

from bagua.net.bench.errors import BenchError
from bagua.net.compare.setting import Setting
from bagua.net.trial import supervisor
from bagua.net.trial.command import launcher_command
from bagua.net.trial.meeting import Meeting
from bagua.net.trial.plan import Plan
from bagua.net.trial.worker import Order

PLAN = Plan(1, 0.1, 10.0)
TORCHRUN = Path(sys.executable).parent / "torchrun"


def test_two_nodes_with_gloo(bagua_net: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """As a user does: the same command on both nodes, which here are one host."""
    port = free_port()
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "trial"]
    command = [str(bagua_net), "test", "--json", "--seconds", "0.05", "--", str(TORCHRUN), "--nnodes", "2"]
    nodes = [
        subprocess.Popen(
            [*command, "--nproc-per-node", "1", "--local-addr", "127.0.0.1", *rendezvous],
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], said
    reports = [output for output, _ in said if output]
    assert len(reports) == 1, said
    (other,) = (messages for output, messages in said if not output)
    assert other == "done; the command on the node of rank 0 prints the result\n"
    report = json.loads(reports[0])
    assert (report["ranks"], report["hosts"], report["backend"]) == (2, 1, "gloo")
    assert [size["bytes"] for size in report["sizes"]] == [64 << 10, 1 << 20, 64 << 20]
    assert all(size["without_gb_s"] > 0 and size["with_gb_s"] > 0 for size in report["sizes"])
    assert all(size["speedup"] is None for size in report["sizes"])
    assert [turn["setting"] for turn in report["turns"]] == [0, 1]
    assert report["headline"] == "gloo was used: nothing was compared."


@pytest.mark.parametrize(
    ("words", "starts_python"),
    [
        (["torchrun", "--nnodes", "2"], False),
        (["/opt/venv/bin/torchrun"], False),
        (["srun", "--nodes", "2", "torchrun", "--nnodes", "2"], False),
        (["python", "-m", "torch.distributed.run"], False),
        (["accelerate", "launch", "--num_machines", "2"], False),
        (["srun", "--nodes", "2"], True),
        (["mpirun", "-x", "MASTER_ADDR=a"], True),
    ],
)
def test_launchers_of_scripts_and_of_commands(words: list[str], starts_python: bool) -> None:
    command = launcher_command(words, PLAN)
    assert command[: len(words)] == words
    *python, script, plan = command[len(words) :]
    assert python == ([sys.executable] if starts_python else [])
    assert Path(script).name == "rank_script.py"
    assert Plan.of_argument(plan) == PLAN


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "no launcher given"),
        (["--nnodes", "2"], 2, "unknown argument '--nnodes'"),
        (["--", "no-such-launcher"], 1, "'no-such-launcher' cannot be started: No such file or directory"),
        (["--", "sh", "-c", "echo wrong option; exit 3"], 1, "sh ended (exit code 3) before its ranks were done"),
        (["--", "sh", "-c", "echo wrong option; exit 3"], 1, "  wrong option"),
        (["--wait", "1", "--", "sh", "-c", "echo joining; exec sleep 60"], 1, "no rank has started within 1 s"),
        (["--", "env"], 1, "the command started a rank without telling its number"),
        (["--", "env", "RANK=0", "WORLD_SIZE=1"], 1, "torchrun started a single rank, which sends nothing"),
        (["--", "env", "RANK=1", "WORLD_SIZE=2"], 1, "MASTER_ADDR, the host of rank 0, is not set"),
    ],
)
def test_what_goes_wrong_before_the_ranks_meet(words: list[str], code: int, message: str, net: RunNet) -> None:
    done = net("test", *words)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_of_one_rank_is_told_while_others_wait(net: RunNet) -> None:
    """They would wait for longer than the test."""
    told = [json.dumps({"kind": "started"}), json.dumps({"kind": "error", "text": "rank 0 cannot listen"})]
    script = "; ".join([*(f"echo 'bagua-net-test-record:{record}'" for record in told), "exec sleep 600"])
    done = net("test", "--", "sh", "-c", script)
    assert (done.returncode, "rank 0 cannot listen" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "rank 1 of 2 did not come within 5 s"), (1, "rank 1 did not reach rank 0 at 127.0.0.1, port")],
)
def test_ranks_that_do_not_meet(rank: int, message: str, net: RunNet) -> None:
    """The wait is of the meeting alone: rank 0 has started long before."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launcher = ["env", *(f"{name}={value}" for name, value in place.items())]
    done = net("test", "--wait", 5, "--", *launcher)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert "Start the same command on every node" in done.stderr


class OtherRanks:
    """In place of the meeting."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure

    def check(self) -> None:
        if self.failure:
            raise BenchError(self.failure)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("", "with Bagua-Net, the all-reduce failed:\n  DistNetworkError: "),
        ("rank 1 (host b): out of memory", r"rank 1 \(host b\): out of memory"),
    ],
)
def test_a_turn_that_fails(failure: str, message: str) -> None:
    """Nothing listens where this rank is told to meet the others; or another rank fails first."""
    setting = Setting("Bagua-Net", os.environ, True)
    order = Order("turn", 0, 2, "127.0.0.1", free_port(), "gloo", 0, (8,), 0.01, 1.0)
    with pytest.raises(BenchError, match=message):
        supervisor._take_turn(cast("Meeting", OtherRanks(failure)), order, setting)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_trial_leaves_no_launcher(
    number: signal.Signals, bagua_net: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    launcher = ["sh", "-c", f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 600"]
    command = subprocess.Popen([str(bagua_net), "test", "--", *launcher], env=environment, cwd=tmp_path)
    try:
        wait_until(mark.exists, "the launcher", 60)
        command.send_signal(number)
        assert command.wait(60) == 130
    finally:
        command.kill()
        command.wait()
    assert not is_alive(int(mark.read_text()))
