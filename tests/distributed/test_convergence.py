"""`measure convergence` with real ranks: a few steps of the digits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

from bagua.net.bench.result_file import read_result

# Found, not imported: every worker of pytest would spend seconds on it.
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("sklearn", "matplotlib"))),
    reason="needs scikit-learn, which brings the digits, and matplotlib: pip install scikit-learn matplotlib",
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))


def trainings(details: Path) -> dict[str, dict[str, Any]]:
    """By algorithm, of one seed."""
    records = [json.loads(line) for line in details.read_text().splitlines()]
    return {record["variant"]: record["sample"] for record in records if "sample" in record}


DIGITS_PARAMETERS = 9610
# That a rank of two sends in a step. Compression adds lengths, ranges and padding.
BYTES_PER_PARAMETER = {
    "gradient_allreduce": (4, 4),
    "bytegrad": (1, 1.05),
    "decentralized": (4, 4),
    # 18 of 60 steps are those of gradient all-reduce; then two rounds.
    "diloco-started": (1.3, 1.4),
}


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_algorithms_train_from_the_same_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details, result, plot = tmp_path / "details.jsonl", tmp_path / "convergence.json", tmp_path / "curves.png"
    words = ["--device", "cpu", "--tasks", "digits", "--algorithms", ",".join(BYTES_PER_PARAMETER)]
    words += ["--seeds", "1", "--steps", "60", "--details", str(details), "--json", str(result), "--plot", str(plot)]
    from measure.convergence import tool

    code = tool.main(words)
    printed = capsys.readouterr().out
    turns = trainings(details)
    assert list(turns) == list(BYTES_PER_PARAMETER), printed
    assert len({one["curve_loss"][0] for one in turns.values()}) == 1, "all algorithms begin with the same model"
    for name, one in turns.items():
        assert one["curve_steps"] == sorted(one["curve_steps"])
        assert one["curve_bytes"] == sorted(one["curve_bytes"])
        least, most = BYTES_PER_PARAMETER[name]
        assert least <= one["curve_bytes"][-1] / one["steps"] / DIGITS_PARAMETERS <= most, one
        assert one["curve_loss"][-1] == one["test_loss"] < one["curve_loss"][0] / 2, one
        differ = name in ("decentralized", "diloco-started")
        assert (0 < one["spread"] < 1e-2) if differ else one["spread"] == 0, one
    # So few steps are no training to the end: an algorithm may fall short, and nothing else may be wrong.
    errors = [line for line in printed.splitlines() if line.startswith("ERROR")]
    assert all("falls short" in line for line in errors), errors
    assert code == (1 if errors else 0)
    assert read_result(result).find("loss_difference", algorithm="bytegrad", model="digits").repetitions == 1
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_fsdp_trains_as_it_does_without_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from measure.convergence import tool

    details = tmp_path / "details.jsonl"
    chosen = ["fsdp", "fsdp_weights-int4-differences"]
    words = ["--device", "cpu", "--tasks", "text-small", "--algorithms", ",".join(chosen), "--seeds", "1"]
    tool.main([*words, "--steps", "24", "--details", str(details)])
    turns = trainings(details)
    assert list(turns) == chosen, capsys.readouterr().out
    assert len({one["curve_loss"][0] for one in turns.values()}) == 1
    plain, compressed = (one["curve_bytes"][-1] for one in turns.values())
    assert plain > 3 * compressed
    for one in turns.values():
        assert one["test_loss"] == pytest.approx(turns["fsdp"]["test_loss"], rel=0.05)
        assert one["test_loss"] < one["curve_loss"][0] - 0.3
