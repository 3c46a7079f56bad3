"""tools/convergence/compare_convergence.py as a program of its own: two ranks on CPUs, a few steps of the digits. What
needs no ranks is in tests/unit/test_convergence.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")
pytest.importorskip("sklearn", reason="needs scikit-learn, which brings the digits: pip install 'bagua[examples]'")
pytest.importorskip("matplotlib", reason="needs matplotlib, which draws the curves: pip install 'bagua[plot]'")

DEADLINE_S = 150.0


def compare(repository: Path, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    script = repository / "tools" / "convergence" / "compare_convergence.py"
    common = ["--device", "cpu", "--tasks", "digits", "--json", str(folder / "convergence.json")]
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
