"""tools/convergence with real ranks: how models are averaged and evaluated, and compare_convergence.py as a program of
its own with a few steps of the digits. What needs no ranks is in tests/unit/test_convergence*.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
import torch
from support.ranks import device_for, run_ranks

pytest.importorskip("sklearn", reason="needs scikit-learn, which brings the digits: pip install 'bagua[examples]'")
pytest.importorskip("matplotlib", reason="needs matplotlib, which draws the curves: pip install 'bagua[plot]'")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools" / "convergence"))

DEADLINE_S = 150.0


def averaged_and_evaluated() -> dict[str, Any]:
    """Each rank has a linear model of its own, of ten samples all evaluate their part."""
    from convergence_comparison.evaluation import evaluate, evaluate_alone, mean_over_ranks
    from convergence_comparison.replicas import average
    from convergence_comparison.task import Split, Task

    import bagua.torch_api as bagua

    rank, device = bagua.get_rank(), device_for(bagua.get_rank())
    bagua.init_process_group()
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(10, 4, generator=generator), torch.arange(10) % 3
    split = Split(inputs, labels).to(device)
    task = Task("test", split, split, lambda: torch.nn.Linear(4, 3), classifies=True)
    replicas = torch.randn(bagua.get_world_size(), 15, generator=generator)
    found = average(replicas[rank].to(device))
    judge = task.build_model().to(device)
    worth = evaluate(task, judge, found.mean, split)
    alone = evaluate_alone(task, judge, found.mean, split)

    mean = replicas.mean(dim=0)
    outputs = inputs @ mean[:12].view(3, 4).T + mean[12:]
    torch.testing.assert_close(found.mean.cpu(), mean)
    loss = float(torch.nn.functional.cross_entropy(outputs, labels))
    right = float((outputs.argmax(dim=1) == labels).float().mean())
    for one in (worth, alone):
        assert (one.loss, one.accuracy) == pytest.approx((loss, right), rel=1e-5)
    largest = (replicas - mean).norm(dim=1).max() / mean.norm()
    assert found.spread == pytest.approx(float(largest), rel=1e-5)
    same = average(replicas[0].to(device))
    assert same.spread == 0.0
    assert torch.equal(same.mean.cpu(), replicas[0])
    assert mean_over_ranks(float(rank), device) == (bagua.get_world_size() - 1) / 2
    return {"loss": worth.loss, "mean": found.mean.tolist()}


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_evaluated_is_the_mean_of_the_replicas(world: int) -> None:
    results = run_ranks(world, averaged_and_evaluated)
    assert all(result == results[0] for result in results)


def compare(repository: Path, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    script = repository / "tools" / "convergence" / "compare_convergence.py"
    common = ["--device", "cpu", "--tasks", "digits", "--details", str(folder / "convergence.json")]
    done = subprocess.run(
        [sys.executable, str(script), *common, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    return done, json.loads((folder / "convergence.json").read_text())


@pytest.mark.timeout(180)
def test_algorithms_train_from_the_same_start(repository: Path, tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    words = ["--algorithms", "bytegrad,decentralized,async", "--seeds", "2", "--steps", "150"]
    done, document = compare(repository, tmp_path, *words, "--plot", str(plot))
    assert document["errors"] == [], done.stderr + done.stdout
    trainings = document["trainings"]
    cases = [one["case"] for one in trainings if one["seed"] == 1]
    assert cases == [row["case"] for row in document["summary"]]
    assert cases == ["gradient_allreduce", "bytegrad", "decentralized", "async"]
    assert [one["case"] for one in trainings if one["seed"] == 2] == [*cases[1:], cases[0]]
    starts = {(one["seed"], one["curve_loss"][0]) for one in trainings}
    assert len(starts) == 2, "all algorithms of a seed begin with the same model, and seeds differ"
    for one in trainings:
        assert one["curve_epochs"] == sorted(one["curve_epochs"])
        assert one["curve_loss"][-1] == one["test_loss"] < one["curve_loss"][0] / 5, one
        assert one["accuracy"] > 0.9, one
        # async has ended with a mean.
        assert (0 < one["spread"] < 1e-2) if one["case"] == "decentralized" else one["spread"] == 0, one
    verdicts = {row["case"]: row["verdict"] for row in document["summary"]}
    assert verdicts["gradient_allreduce"] == ""
    # So few steps are no training to the end, but bytegrad is close to its baseline all the way.
    assert verdicts["bytegrad"] == "holds"
    assert done.returncode == (0 if set(verdicts.values()) <= {"", "holds"} else 1)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(180)
def test_what_cannot_work_is_reported_and_the_rest_goes_on(repository: Path, tmp_path: Path) -> None:
    """Three ranks make no pairs."""
    words = [
        "--nproc-per-node",
        "3",
        "--algorithms",
        "decentralized-shift_one,bytegrad",
        "--seeds",
        "1",
        "--steps",
        "3",
    ]
    done, document = compare(repository, tmp_path, *words)
    assert done.returncode == 1
    (error,) = document["errors"]
    assert error.startswith("decentralized-shift_one with digits, seed 1: rank ")
    assert "shift_one" in error.split("failed while", 1)[1]
    assert sorted(row["case"] for row in document["summary"]) == ["bytegrad", "gradient_allreduce"]
    assert f"ERROR: {error}" in done.stdout
