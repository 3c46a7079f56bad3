"""`measure core` in emulated networks: two hosts, a small model, a few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tools") not in sys.path:
    sys.path.append(str(_ROOT / "tools"))

from netlab import missing_privilege, missing_tap_device  # noqa: E402

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

from measure.core import tool  # noqa: E402

_LACKING = missing_privilege() or missing_tap_device()


@pytest.mark.deep
@pytest.mark.netns
@pytest.mark.timeout(240)
@pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
def test_a_network_is_between_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details, result = (tmp_path / name for name in ("details.jsonl", "core.json"))
    words = ["--networks", "200M+10ms", "--device", "cpu", "--model", "wide", "--length", "256"]
    words += ["--algorithms", "torch-ddp,with-bagua", "--baseline", "with-bagua"]
    words += ["--rounds", "1", "--steps", "2", "--time-limit", "60"]
    code = tool.main([*words, "--details", str(details), "--json", str(result)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    turns = [json.loads(line) for line in details.read_text().splitlines() if '"sample"' in line]
    assert {(one["case"]["network"], one["variant"]) for one in turns} == {
        ("200M+10ms", "torch-ddp"),
        ("200M+10ms", "with-bagua"),
    }
    assert [one["sample"]["largest_difference"] for one in turns if one["variant"] == "with-bagua"] == [0], "same sums"
    found = read_result(result)
    # Each sends 1.3 MB of gradients at 25 MB/s.
    slow = found.find("step_time", algorithm="gradient_allreduce", rate_gbps=0.2, delay_ms=10.0)
    assert slow.median > 50
