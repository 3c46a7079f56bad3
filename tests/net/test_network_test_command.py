"""`bagua-net test` with real launchers and ranks on this machine, and with what can go wrong before they meet."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.forked_launcher import launch, run_launcher
from support.fresh_process import RunNet
from support.labs import Lab, enter_namespace, missing_privilege
from support.ports import free_port
from support.processes import is_alive, wait_until
from support.ranks import run_ranks
from support.sweeps import rest_is_deep

from bagua.cli.net import main
from bagua.net.network_test.command import Plan, launcher_command, parse, users_script

PLAN = Plan(1, 0.1, 10.0)
TORCHRUN = Path(sys.executable).parent / "torchrun"


def of_rank(rank: int, address: str, port: int) -> list[str]:
    """A launcher that sets variables."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return ["env", *(f"{name}={value}" for name, value in place.items())]


def with_torchrun(rank: int, address: str, port: int) -> list[str]:
    words = [str(TORCHRUN), "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
    return [*words, "--master-addr", address, "--master-port", str(port), "--local-addr", address]


def _on_node(namespaces: list[str], words: list[list[str]], environments: list[dict[str, str]]) -> tuple[int, str, str]:
    node = int(os.environ["RANK"])
    if namespaces:
        enter_namespace(namespaces[node])
    return launch("bagua.cli.net", words[node], "/", environments[node], True)


def run_on_two_nodes(
    launcher: Callable[[int, str, int], list[str]], environment: dict[str, str], **changes: str
) -> list[tuple[int, str, str]]:
    """As a user does: the same command on both nodes, which are this host without root. Exit code, output and errors of
    each; `changes`: of rank 1."""
    port = free_port(2)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(rate_mbit=1000)) if missing_privilege() is None else None
        hosts = lab.hosts if lab else ()
        address = hosts[0].address() if hosts else "127.0.0.1"
        common = {**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environments = [common | {"GLOO_SOCKET_IFNAME": host.interfaces[0]} for host in hosts] or [common, common]
        environments[1] = environments[1] | changes
        test = ["test", "--json", "--seconds", "0.05", "--"]
        words = [[*test, *launcher(node, address, port)] for node in (0, 1)]
        namespaces = [str(host.namespace.path) for host in hosts]
        return run_ranks(2, _on_node, namespaces, words, environments, timeout=240)


# torchrun imports torch two times more.
@pytest.mark.parametrize("launcher", rest_is_deep([of_rank, with_torchrun], 0))
def test_two_nodes_with_gloo(launcher: Callable[[int, str, int], list[str]], environment: dict[str, str]) -> None:
    first, second = run_on_two_nodes(launcher, environment)
    assert (first[0], *second) == (0, 0, "", "done; the command on the node of rank 0 prints the result\n"), first
    report = json.loads(first[1])
    assert (report["ranks"], report["backend"]) == (2, "gloo")
    assert [size["bytes"] for size in report["sizes"]] == [64 << 10, 1 << 20, 64 << 20]
    assert all(size["without_gb_s"] > 0 and size["with_gb_s"] > 0 for size in report["sizes"])
    assert all(size["speedup"] is None for size in report["sizes"])
    assert [(turn["setting"], turn["traffic"]["nbytes"] > 0) for turn in report["turns"]] == [(0, True), (1, True)]
    assert report["headline"] == "gloo was used: nothing was compared."


@pytest.mark.deep
def test_a_rank_that_fails_ends_both_commands(environment: dict[str, str]) -> None:
    first, second = run_on_two_nodes(of_rank, environment, GLOO_SOCKET_IFNAME="absent0")
    assert (first[:2], second[:2]) == ((1, ""), (1, "")), (first, second)
    assert "rank 1 on" in first[2]
    assert "absent0" in first[2]
    assert "the command on the node of rank 0 says why" in second[2].lower()


def test_launchers_of_scripts_and_of_commands() -> None:
    for launcher, starts_python in (
        ("torchrun --nnodes 2", False),
        ("/opt/venv/bin/torchrun", False),
        ("srun --nodes 2 torchrun --nnodes 2", False),
        ("python -m torch.distributed.run", False),
        ("accelerate launch --num_machines 2", False),
        ("srun --nodes 2", True),
        ("mpirun -x MASTER_ADDR=a", True),
        ("python own_launcher.py --nodes 2", True),
        ("srun --nodes 2 ./set_network.sh", True),
    ):
        words = launcher.split()
        assert users_script(words) is None
        command = launcher_command(words, PLAN)
        assert command[: len(words)] == words
        *python, script, plan = command[len(words) :]
        assert python == ([sys.executable] if starts_python else [])
        assert Path(script).name == "rank_script.py"
        assert Plan(**json.loads(plan)) == PLAN


def test_a_script_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")  # no launcher could be started: another message
    for launcher, script in (
        ("torchrun --nproc-per-node 2", "train.py"),
        ("torchrun --nnodes 2", "missing/train.py --lr 1"),
        ("torchrun --nnodes 2", "-m package.train"),
        ("srun --nodes 2 torchrun --nnodes 2", "train.py"),
        ("python -m torch.distributed.run", "train.py"),
        ("accelerate launch", "train.py"),
        ("srun --nodes 2", "python3 -u train.py"),
        ("mpirun -x MASTER_ADDR=a", "/opt/bin/python -m package.train"),
    ):
        assert main(["test", "--", *launcher.split(), *script.split()]) == 2
        errors = capsys.readouterr().err
        assert f"leave yours out: bagua-net test -- {launcher}\n" in errors
        assert f"bagua-net compare -- {launcher} {script}\n" in errors


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "no launcher given"),
        (["--nnodes", "2"], 2, "unknown argument '--nnodes'"),
        (["--", "no-such-launcher"], 1, "'no-such-launcher' cannot be started: No such file or directory"),
        (["--", "sh", "-c", "echo wrong option; exit 3"], 1, "sh ended (exit code 3) before its ranks were done"),
        (["--", "sh", "-c", "echo wrong option; exit 3"], 1, "  wrong option"),
        (["--wait", "1", "--", "sh", "-c", "echo joining; exec sleep 60"], 1, "no rank has started within 1 s"),
        (
            ["--", "sh", "-c", "exit 0", "train.py"],
            1,
            "\nIf a script of yours ran, leave it out: `test` has its own.\n",
        ),
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


def _told(kind: str, **values: str) -> str:
    return f"echo 'bagua-net-test-record:{json.dumps({'kind': kind, **values})}'"


def test_an_error_of_one_rank_is_told_while_others_wait(net: RunNet, tmp_path: Path) -> None:
    """They would wait for longer than the test, and end with it. Of a rank that says nothing more, the command says
    just that."""
    told = [_told("started"), _told("started"), _told("error", text="rank 0 cannot listen"), "exec sleep 600"]
    done = net("test", "--", "sh", "-c", f"echo $$ > {tmp_path / 'pid'}; {'; '.join(told)}")
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert (done.returncode, "rank 0 cannot listen" in done.stderr) == (1, True), done.stderr
    assert "1 other rank of this command has not reported within 5 s" in done.stderr


def test_errors_of_several_ranks_are_told(net: RunNet) -> None:
    """The first is often a consequence: the connection to a rank that failed and says so later. What ranks have from
    one another is told once."""
    texts = ["connection closed by peer", "rank 1 (host b): out of memory", "connection closed by peer"]
    told = [*[_told("started")] * 3, *(_told("error", text=text) for text in texts)]
    done = net("test", "--", "sh", "-c", "; ".join(told))
    assert done.returncode == 1
    assert done.stderr.count("connection closed by peer") == done.stderr.count("out of memory") == 1, done.stderr
    assert "has not reported" not in done.stderr


@pytest.mark.parametrize(
    ("rank", "message"),
    [(0, "1 of 2 ranks (rank 1) did not reach port"), (1, "): rank 0 at 127.0.0.1:")],
)
def test_ranks_that_do_not_meet(rank: int, message: str, environment: dict[str, str], tmp_path: Path) -> None:
    """The wait is of the meeting alone: rank 0 has started long before."""
    variables = dict(word.split("=") for word in of_rank(rank, "127.0.0.1", free_port(2))[1:])
    plan = json.dumps(asdict(replace(PLAN, wait_s=5)))
    done = run_launcher("bagua.net.network_test.rank", [plan], tmp_path, environment | variables, 240)
    told = [record for line in done.stdout.splitlines() if (record := parse(line))]
    assert (done.returncode, [record["kind"] for record in told]) == (0, ["started", "error"]), done
    assert message in told[1]["text"]
    assert "within 5 s" in told[1]["text"]
    assert "choose another with MASTER_PORT" in told[1]["text"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_test_leaves_no_launcher(
    number: signal.Signals, bagua_net: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    launcher = ["sh", "-c", f"echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 600"]
    command = subprocess.Popen([str(bagua_net), "test", "--", *launcher], env=environment, cwd=tmp_path)
    try:
        wait_until(mark.exists, "the launcher")
        command.send_signal(number)
        assert command.wait(60) == 130
    finally:
        command.kill()
        command.wait()
    wait_until(lambda: not is_alive(int(mark.read_text())), "the end of the launcher")
