"""tools/sweep: a network of two hosts, a small model, a few steps. What needs no network is in
tests/unit/test_sweep.py."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tools") not in sys.path:
    sys.path.append(str(_ROOT / "tools"))

from netlab import missing_privilege, missing_tap_device  # noqa: E402
from sweep import cli  # noqa: E402

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

_LACKING = missing_privilege() or missing_tap_device()


@pytest.mark.netns
@pytest.mark.timeout(240)
@pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
def test_a_network_is_measured_and_the_winner_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of the test's process
    details, result = (tmp_path / name for name in ("details.json", "sweep.json"))
    words = ["--rates", "200M", "--delays", "10ms", "--length", "256", "--algorithms", "torch-ddp,with-bagua,bytegrad"]
    words += ["--rounds", "1", "--steps", "2", "--time-limit", "30"]
    code = cli.main([*words, "--details", str(details), "--json", str(result)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    document = json.loads(details.read_text())
    assert document["errors"] == []
    (network,) = document["turns"]
    assert network["is_limited"]
    rows = {one["algorithm"]: one for one in network["rows"]}
    assert tuple(rows) == ("torch-ddp", "with-bagua", "bytegrad")
    assert rows["with-bagua"]["largest_difference"] == 0, "two ranks: the same sums"
    # The network is really between them: each sends 1.3 MB of gradients at 25 MB/s.
    assert min(rows[name]["step_ms"] for name in ("torch-ddp", "with-bagua")) > 50
    assert sum(usage["bytes"] for usage in network["delays"]) > 10 << 20
    assert "-- the fastest, of all (wide)" in printed
    found = read_result(result)
    assert found.find("step_time", algorithm="gradient_allreduce", rate_gbps=0.2, delay_ms=10.0).median > 50
    assert found.find("speedup", algorithm="bytegrad").repetitions == 1
    assert not list(Path("/run/netns").glob(f"netlab-{os.getpid()}-*"))
