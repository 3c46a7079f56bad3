"""tools/sweep as a program: two networks of two hosts, small models, a few steps. What needs no network is in
tests/unit/test_sweep.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result

_ROOT = Path(__file__).resolve().parents[2]
if str(_ROOT / "tools") not in sys.path:
    sys.path.append(str(_ROOT / "tools"))

from netlab import missing_privilege, missing_tap_device  # noqa: E402

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

_LACKING = missing_privilege() or missing_tap_device()
_ALGORITHMS = ("torch-ddp", "with-bagua", "bytegrad", "decentralized", "async")
_DEADLINE_S = 150.0


@pytest.mark.netns
@pytest.mark.timeout(180)
@pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
def test_networks_are_measured_and_the_winners_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sweep", "--rates", "200M,400G", "--delays", "10ms", "--length", "256"]
    command += ["--algorithms", ",".join(_ALGORITHMS), "--rounds", "1", "--steps", "2", "--time-limit", "30"]
    command += ["--details", str(tmp_path / "sweep.json"), "--json", str(tmp_path / "result.json")]
    command += ["--plot", str(tmp_path / "winners.png")]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(_ROOT / "tools")]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    document = json.loads((tmp_path / "sweep.json").read_text())
    assert document["errors"] == []
    slow, fast = document["networks"]
    assert (slow["is_limited"], fast["is_limited"]) == (True, False)
    for network in (slow, fast):
        rows = {one["algorithm"]: one for one in network["rows"]}
        assert tuple(rows) == _ALGORITHMS
        assert rows["torch-ddp"]["largest_difference"] in (0, None)
        assert rows["with-bagua"]["largest_difference"] == 0, "two ranks: the same sums"
        # Two buckets that go to the other host and back: the network is really between them.
        assert rows["with-bagua"]["step_ms"] >= 20
        assert network["winners"]["wide"]["of all"]["algorithm"] in _ALGORITHMS
        assert sum(usage["bytes"] for usage in network["delays"]) > 10 << 20
    # Each of 1.3 MB of gradients at 25 MB/s.
    assert min(row["step_ms"] for row in slow["rows"] if row["algorithm"] in ("torch-ddp", "with-bagua")) > 50
    assert "-- the fastest, of all (wide)" in done.stdout
    result = read_result(tmp_path / "result.json")
    assert result.find("step_time", algorithm="gradient_allreduce", rate_gbps=0.2, delay_ms=10.0).median > 50
    assert result.find("speedup", algorithm="async", rate_gbps=None).repetitions == 1
    assert (tmp_path / "winners.png").stat().st_size > 1000
    assert not list(Path("/run/netns").glob(f"netlab-{os.getpid()}-*"))
