"""tools/train/compare_core.py as a program of its own: two ranks on CPUs, a small model, a few steps. What needs no
ranks is in tests/unit/test_core_comparison.py."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

ALGORITHMS = ("torch-ddp", "with-bagua", "bagua-ddp")
DEADLINE_S = 100.0


def compare(repository: Path, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    script = repository / "tools" / "train" / "compare_core.py"
    common = ["--nproc-per-node", "2", "--device", "cpu", "--warmup", "1", "--details", str(folder / "core.json")]
    done = subprocess.run(
        [sys.executable, str(script), *common, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    return done, json.loads((folder / "core.json").read_text())


@pytest.mark.timeout(120)
def test_algorithms_take_turns_and_train_the_same_model(repository: Path, tmp_path: Path) -> None:
    words = ["--model", "convnet", "--steps", "3", "--rounds", "2", "--deterministic", "--trace", str(tmp_path / "t")]
    # Two ranks: sums of two have one order, so that whatever carries them ends with the same bits.
    done, document = compare(repository, tmp_path, *words, "--tolerance", "0")
    assert done.returncode == 0, done.stderr + done.stdout
    assert document["errors"] == document["notes"] == []
    order = [(turn["round"], turn["algorithm"]) for turn in document["turns"]]
    first, second, third = ALGORITHMS
    assert order == [(0, first), (0, second), (0, third), (1, second), (1, third), (1, first)]
    for turn in document["turns"]:
        assert len(turn["step_seconds"]) == 3
        assert turn["replicas_agree"]
    assert [turn["largest_difference"] for turn in document["turns"]] == [None, 0, 0, 0, 0, 0]
    for traced in document["trace"]["traces"]:
        assert traced["by_operation"]["gloo:all_reduce"]["count"] >= 1, traced
        assert traced["hidden_ms"] + traced["communication_ms"] > 0
        with gzip.open(tmp_path / "t" / f"convnet.{traced['algorithm']}.json.gz", "rt") as file:
            assert json.load(file)["traceEvents"]
    assert [row.split()[:2] for row in done.stdout.splitlines() if row.startswith("convnet")] == [
        ["convnet", algorithm] for algorithm in ALGORITHMS
    ]


@pytest.mark.timeout(120)
def test_every_algorithm_keeps_what_it_promises(repository: Path, tmp_path: Path) -> None:
    words = ["--model", "mlp", "--length", "8", "--steps", "2", "--warmup", "3", "--rounds", "1", "--timeout", "60"]
    done, document = compare(repository, tmp_path, *words, "--algorithms", "algorithms", "--baseline", "with-bagua")
    assert done.returncode == 0, done.stderr + done.stdout
    assert document["errors"] == []
    rows = {row["algorithm"]: row for row in document["summary"]}
    assert set(rows) == {
        *("torch-ddp", "ddp-fp16", "ddp-powersgd", "ddp-bytegrad", "with-bagua", "bytegrad", "bytegrad-flat", "qadam"),
        *("decentralized", "decentralized-shift-one", "low-precision-decentralized", "async"),
    }
    assert rows["with-bagua"]["relative_difference"] == 0
    for name, row in rows.items():
        assert row["replicas_agree"] or row["promise"] == "own", name
        assert (row["speed_up"] is None) == (name == "with-bagua")
    # What compresses is no plain all-reduce in the measured steps.
    for name in ("ddp-fp16", "ddp-powersgd", "ddp-bytegrad", "bytegrad", "bytegrad-flat", "qadam"):
        assert rows[name]["relative_difference"] > 0, name
    # Timed from one average to another.
    (averaged,) = (turn for turn in document["turns"] if turn["algorithm"] == "async")
    assert 1 <= averaged["averagings"] == len(averaged["step_seconds"]) <= 2
    assert rows["async"]["steps_per_averaging"] == averaged["steps"] / averaged["averagings"] >= 1
    assert all(row["steps_per_averaging"] is None for name, row in rows.items() if name != "async")
    # Ranks of their own: two batches are two models.
    assert not rows["decentralized-shift-one"]["replicas_agree"]


@pytest.mark.timeout(120)
def test_a_rank_alone_waits_for_no_average(repository: Path, tmp_path: Path) -> None:
    words = ["--nproc-per-node", "1", "--model", "mlp", "--length", "8", "--steps", "2", "--rounds", "1"]
    done, document = compare(repository, tmp_path, *words, "--algorithms", "async", "--baseline", "async")
    assert done.returncode == 0, done.stderr + done.stdout
    (turn,) = document["turns"]
    assert (len(turn["step_seconds"]), turn["steps"], turn["averagings"]) == (2, 2, None)


@pytest.mark.timeout(120)
def test_a_model_that_fails_is_reported_and_the_next_is_measured(repository: Path, tmp_path: Path) -> None:
    words = ["--model", "vgg16,mlp", "--length", "33", "--algorithms", "torch-ddp", "--steps", "1", "--rounds", "1"]
    done, document = compare(repository, tmp_path, *words)
    assert done.returncode == 1
    (error,) = document["errors"]
    assert error.startswith("torch-ddp with vgg16: rank")
    assert "ValueError: --length 33: vgg16 halves a picture five times; use a multiple of 32" in error
    assert [(row["model"], row["replicas_agree"]) for row in document["summary"]] == [("mlp", True)]
    assert f"ERROR: {error}" in done.stdout
