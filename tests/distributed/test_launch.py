"""`python -m bagua.distributed.launch` and `.run`: what processes get, and how jobs end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support.algorithm_cases import OLD_NAMES
from support.forked_launcher import run_launcher
from support.ports import free_port
from support.processes import living_pids
from support.ranks import run_ranks
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from bagua.distributed import launch, run

TIMEOUT_S = 240
LAUNCH, RUN = "bagua.distributed.launch", "bagua.distributed.run"
OLD_SCRIPT = Path(__file__).resolve().parents[1] / "support" / "old_digits.py"

STATE = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS", "ENABLE_BAGUA_NET", "BAGUA_DEFAULT_BUCKET_SIZE")
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))
print("to stderr", file=sys.stderr)
"""

# Rank 0 waits until it is ended; rank 1 fails once rank 0 is there.
ONE_FAILS = """
import os, signal, sys, time
folder = sys.argv[1]
if os.environ["RANK"] == "0":
    open(os.path.join(folder, str(os.getpid())), "w")
    signal.pause()
while not os.listdir(folder):
    time.sleep(0.01)
sys.exit(7)
"""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def _run(module: str, words: list[str], cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_launcher(module, words, cwd, _environment(), TIMEOUT_S)
    assert done.returncode == expect, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def _script(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return "train.py"


def _accuracies() -> dict[str, float]:
    """With one algorithm after the other, in ranks that have what the launcher gives processes: see the next test."""
    main = runpy.run_path(str(OLD_SCRIPT))["main"]
    warnings.resetwarnings()
    found = {}
    for name in OLD_NAMES:
        sys.argv = ["digits.py", f"--local_rank={os.environ['LOCAL_RANK']}", "--epochs=2", "--algorithm", name]
        found[name] = main()
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="needs scikit-learn, which brings the digits: pip install scikit-learn",
)
def test_a_script_of_0_9_learns_with_every_algorithm() -> None:
    for accuracies in run_ranks(2, _accuracies):
        assert [one for one in accuracies.items() if one[1] < 0.6] == []


def test_processes_get_variables_arguments_and_logs(tmp_path: Path) -> None:
    flags = ["--set_additional_flag", "--default_bucket_size=1M", "--logdir=logs", "--enable_bagua_net"]
    port = free_port()
    options = ["--nproc_per_node=2", f"--master_port={port}", *flags]
    done = _run(LAUNCH, [*options, _script(tmp_path, STATE), "--lr", "a b"], tmp_path)
    assert done.stdout == ""
    assert [path.read_text() for path in (tmp_path / "logs").rglob("stderr.log")] == ["to stderr\n"] * 2
    told = sorted(json.loads(path.read_text()) for path in (tmp_path / "logs").rglob("stdout.log"))
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port)}
    common |= {"ENABLE_BAGUA_NET": "1", "BAGUA_DEFAULT_BUCKET_SIZE": "1M", "OMP_NUM_THREADS": "1"}
    expected = [
        [[f"--local_rank={rank}", "--lr", "a b"], common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}]
        for rank in range(2)
    ]
    assert told == expected


def test_one_failure_ends_all(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    options = ["--nproc_per_node=2", f"--master_port={free_port()}"]
    done = _run(LAUNCH, [*options, _script(tmp_path, ONE_FAILS), str(pids)], tmp_path, expect=1)
    assert "python -m bagua.distributed.launch: a process failed." in done.stderr
    assert re.search(r"rank\s*: 1 .*\n\s*exitcode\s*: 7", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert list(pids.iterdir()) != []
    assert living_pids(pids) == []


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert launch.main([f"--master_port={port}", __file__]) == 1
    printed = capsys.readouterr().err
    assert f"python -m bagua.distributed.launch: port {port} is in use on this node" in printed
    assert "choose another port, the same on all nodes: --master_port" in printed


@pytest.mark.parametrize(
    ("words", "told", "remedy"),
    [
        (["--nproc-per-node=0", __file__], "--nproc-per-node: 0 is too small", "start at least 1 process per node"),
        (["missing.py"], "missing.py: no such file in ", "Give the path of the script"),
        (["--nproc-per-node=many", __file__], "torchrun does not accept the options: ", "See --help"),
        (
            ["--nnodes=2", "--node-rank=1", f"--master-port={free_port()}", "--rdzv-conf=timeout=1", __file__],
            "the rendezvous of 2 nodes at 127.0.0.1:",
            "Check that the command runs on every node",
        ),
    ],
)
def test_errors_of_run_name_the_remedy(
    words: list[str], told: str, remedy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert run.main(words) != 0
    printed = capsys.readouterr().err
    assert f"python -m bagua.distributed.run: {told}" in printed
    assert remedy in printed


def test_a_node_that_joins_a_job_that_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint = f"127.0.0.1:{store.port}"
    job = RendezvousParameters("c10d", endpoint, "job1", min_nodes=1, max_nodes=1, is_host="0")
    get_rendezvous_handler(job).set_closed()  # as the agent of a node does at the end of the job
    words = [f"--rdzv-endpoint={endpoint}", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0", "--rdzv-id=job1"]
    assert run.main([*words, __file__]) == 1
    printed = capsys.readouterr().err
    assert f"the rendezvous job1 at {endpoint} is closed: the job has ended" in printed
    assert "Traceback" not in printed


def test_run_is_torchrun_with_the_flags_of_bagua(tmp_path: Path) -> None:
    command = [sys.executable, "-m", RUN, "--standalone", "--nproc-per-node=2"]
    flags = ["--default-bucket-size=2M", "--set-additional-flag", "--logdir=logs"]
    words = [*command, *flags, _script(tmp_path, STATE), "-m", "x"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=_environment(), timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    told = sorted(json.loads(path.read_text()) for path in (tmp_path / "logs").rglob("stdout.log"))
    assert [words for words, _ in told] == [[f"--local_rank={rank}", "-m", "x"] for rank in range(2)]
    for rank, (_, variables) in enumerate(told):
        assert variables["RANK"] == str(rank)
        assert variables["BAGUA_DEFAULT_BUCKET_SIZE"] == "2M"
        assert variables["ENABLE_BAGUA_NET"] is None
