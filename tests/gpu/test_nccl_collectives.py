"""Every collective through the plugin gives the right data, at sizes below, at and above its thresholds, beside NCCL's
own network in the same run; and training through it gives the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpu_job import RANKS
from support.ranks import visible_gpus

from bagua.net.bench.result_file import read_result

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEADLINE_S = 280


@pytest.mark.timeout(300)
@pytest.mark.parametrize("datatype", ["float32", "bfloat16"])
def test_every_collective_is_right_through_the_plugin(tmp_path: Path, datatype: str) -> None:
    words = ["--ranks", str(RANKS), "--share-gpus", "--collectives", "all", "-d", datatype]
    words += ["-b", "4", "-e", "64M", "-f", "8"]
    words += ["-n", "3", "-w", "1", "--repeats", "1", "--tuned", "none", "--time-limit", "200"]
    done = subprocess.run(
        [sys.executable, "-m", "bagua.cli.net_bench", "--nccl", *words, "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    result = read_result(tmp_path / "nccl.json")
    assert {one.case["collective"] for one in result.select("time", backend="plugin")} == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
        "broadcast",
    }
    assert not any(note.startswith("WRONG DATA") or "are missing" in note for note in result.notes)
    networks = result.parameters["networks"]
    assert {proof["network"] for proof in networks["bagua-net"]} == {"BaguaNet"}
    assert {proof["network"] for proof in networks["NCCL default"]} == {"Socket"}


@pytest.mark.timeout(300)
def test_a_backend_that_did_not_get_its_network_fails_the_run(tmp_path: Path) -> None:
    """A library that NCCL cannot open: without the proof its figures would be NCCL's own, under our name."""
    broken = tmp_path / "libnccl-net.so"
    broken.write_bytes(b"no library")
    words = ["--ranks", str(RANKS), "--share-gpus", "--library", str(broken), "--tuned", "none"]
    words += ["-b", "1K", "-e", "1K", "-n", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "bagua.cli.net_bench", "--nccl", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1, done.stderr + done.stdout
    assert "bagua-net should have used network BaguaNet, but rank 0 used Socket" in done.stdout


@pytest.mark.skipif(len(visible_gpus()) < RANKS, reason=f"measure networks gives each of {RANKS} ranks a GPU")
@pytest.mark.timeout(300)
def test_training_through_the_plugin_gives_the_same_losses(repository: Path, tmp_path: Path) -> None:
    words = ["--nproc-per-node", str(RANKS), "--model", "convnet", "--steps", "10", "--rounds", "1", "--tuned", "none"]
    words.append("--deterministic")
    path = tmp_path / "networks.json"
    done = subprocess.run(
        [sys.executable, "-m", "measure", "networks", *words, "--json", str(path), "--output-dir", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(repository / "tools")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    losses = {one.case["backend"]: one.median for one in read_result(path).select("loss")}
    assert losses["plugin"] == losses["nccl"]
