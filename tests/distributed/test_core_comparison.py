"""`measure core` with two real ranks on CPUs: an algorithm of each way to wrap and of each promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core import tool

from bagua.net.bench.result_file import read_result

CHOSEN = ["torch-ddp", "with-bagua", "bagua-ddp", "ddp-powersgd", "ddp-bytegrad", "bytegrad", "qadam"]
CHOSEN += ["decentralized-shift-one", "async", "fsdp", "fsdp-int4-differences"]


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_every_algorithm_keeps_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details, result = tmp_path / "details.json", tmp_path / "core.json"
    words = [
        "--nproc-per-node",
        "2",
        "--device",
        "cpu",
        "--model",
        "mlp",
        "--length",
        "8",
        "--algorithms",
        ",".join(CHOSEN),
    ]
    words += ["--steps", "2", "--warmup", "3", "--rounds", "1", "--baseline", "with-bagua", "--deterministic"]
    # Two ranks: sums of two have one order, so that whatever carries them ends with the same bits.
    words += ["--tolerance", "0", "--timeout", "60", "--details", str(details), "--json", str(result)]
    code = tool.main(words)
    printed = capsys.readouterr().out
    assert code == 0, printed
    document = json.loads(details.read_text())
    assert document["errors"] == document["notes"] == []
    turns = {turn["algorithm"]: turn for turn in document["turns"]}
    rows = {row["algorithm"]: row for row in document["summary"]}
    assert list(turns) == list(rows) == CHOSEN
    assert all(turns[name]["largest_difference"] == 0 for name in ("with-bagua", "bagua-ddp", "fsdp"))
    for name, row in rows.items():
        assert row["replicas_agree"] or row["promise"] == "own", name
        assert (row["speed_up"] is None) == (name == "with-bagua")
    # What compresses is no plain all-reduce in the measured steps.
    for name in ("ddp-powersgd", "ddp-bytegrad", "bytegrad", "qadam", "fsdp-int4-differences"):
        assert rows[name]["relative_difference"] > 0, name
    # Timed from one average to another.
    averaged = turns["async"]
    assert 1 <= averaged["averagings"] == len(averaged["step_seconds"]) <= 2
    assert rows["async"]["steps_per_averaging"] == averaged["steps"] / averaged["averagings"] >= 1
    assert all(row["steps_per_averaging"] is None for name, row in rows.items() if name != "async")
    # Ranks of their own: two batches are two models.
    assert not rows["decentralized-shift-one"]["replicas_agree"]
    assert [row.split()[1] for row in printed.splitlines() if row.startswith("mlp ")] == CHOSEN
    assert read_result(result).find("step_time", algorithm="bytegrad", ranks=2).median > 0
