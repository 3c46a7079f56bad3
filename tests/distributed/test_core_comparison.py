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
    details, result = tmp_path / "details.jsonl", tmp_path / "core.json"
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
    found = read_result(result)
    assert list(found.notes) == []
    records = [json.loads(line) for line in details.read_text().splitlines()]
    turns = {record["variant"]: record["sample"] for record in records if "sample" in record}
    assert list(turns) == CHOSEN
    assert all(turns[name]["largest_difference"] == 0 for name in ("with-bagua", "bagua-ddp", "fsdp"))
    assert {name for name, turn in turns.items() if not turn["replicas_agree"]} == {"decentralized-shift-one"}
    speed_ups = {one.case["algorithm"] for one in found.select("speedup")}
    assert len(speed_ups) == len(CHOSEN) - 1
    assert "gradient_allreduce" not in speed_ups
    # What compresses is not a plain all-reduce in the measured steps.
    for name in ("ddp-powersgd", "ddp-bytegrad", "bytegrad", "qadam", "fsdp-int4-differences"):
        assert turns[name]["relative_difference"] > 0, name
    # Timed from one average to another.
    averaged = turns["async"]
    assert 1 <= averaged["averagings"] == len(averaged["step_seconds"]) <= 2
    assert found.find("steps_per_average").median == averaged["steps"] / averaged["averagings"] >= 1
    assert [row.split()[1] for row in printed.splitlines() if row.startswith("mlp ")] == CHOSEN
    assert found.find("step_time", algorithm="bytegrad", ranks=2).median > 0
