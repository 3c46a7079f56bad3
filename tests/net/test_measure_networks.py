"""The tools that measure networks, each from end to end on CPUs: `measure networks, all_reduce, core, nics`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure import all_reduce, networks
from measure.core import tool as core
from measure.nics import tool as nics
from netlab import missing_tap_device
from support.labs import needs_lab

from bagua.net.bench.result_file import read_result

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]
_NO_TAP = missing_tap_device()
needs_delays = pytest.mark.skipif(_NO_TAP is not None, reason=str(_NO_TAP))


def test_the_comparison_trains_and_finds_equal_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "networks.json"
    words = ["--device", "cpu", "--model", "mlp", "--length", "16", "--steps", "16", "--rounds", "1", "--warmup", "0"]
    words += ["--tuned", "none", "--timeout", "100", "--time-limit", "220", "--json", str(path)]
    code = networks.main([*words, "--output-dir", str(tmp_path)])
    assert code == 0, capsys.readouterr()
    result = read_result(path)
    losses = [result.find("loss", backend=name, model="mlp").median for name in ("nccl", "plugin")]
    assert losses[0] == losses[1]
    assert losses[0] < 2.0, "the model learns, so equal losses mean something"
    assert result.find("speedup", backend="plugin", model="mlp").repetitions == 1


@needs_lab
@pytest.mark.slow
def test_all_reduce_goes_on_without_a_backend_that_fails_and_measures_a_network_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all-reduce.json"
    words = ["--device", "cpu", "--networks", "free:9000:unknown", "--sizes", "4K,64K", "--rounds", "2"]
    words += ["--turn", "0.05", "--tuned", "none", "--lines", str(tmp_path / "lines"), "--json", str(path)]
    code = all_reduce.main([*words, "--network-limit", "200", "--variant", "broken:PYTHONHOME=/nonexistent"])
    assert code == 1
    assert "free:9000:unknown: bagua-net-bench exited with code 1" in capsys.readouterr().out
    first = read_result(path)
    for backend in ("nccl", "plugin"):
        assert first.find("time", backend=backend, size_bytes=1 << 16, told_mbps=-1, mtu=9000).repetitions == 2
    assert all_reduce.main(words) == 0, "nothing is left to measure"
    assert read_result(path).figures == first.figures


@needs_lab
@needs_delays
def test_a_network_is_between_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details, result = (tmp_path / name for name in ("details.jsonl", "core.json"))
    words = ["--networks", "200M+10ms", "--device", "cpu", "--model", "wide", "--length", "256"]
    words += ["--algorithms", "torch-ddp,with-bagua", "--baseline", "with-bagua"]
    words += ["--rounds", "1", "--steps", "2", "--time-limit", "60"]
    code = core.main([*words, "--details", str(details), "--json", str(result)])
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


@needs_lab
@needs_delays
def test_the_best_nic_alone_and_all_are_measured_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "nics.json"
    words = ["--networks", "100M/50M,100M/100M+2ms~1%", "--device", "cpu", "--sizes", "8,256K", "--rounds", "1"]
    words += ["--time-limit", "120", "--cuts", "4", "--down", "0.2"]
    code = nics.main([*words, "--json", str(result)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    found = read_result(result)
    times = {(one.case["nics"], one.case["size_bytes"]) for one in found.select("time", backend=nics.JOINED)}
    assert times == {(network, size) for network in ("100M/50M", "100M/100M+2ms~1%") for size in (8, 256 << 10)}
    alone = found.find("time", nics="100M/50M", size_bytes=256 << 10, backend=nics.BEST)
    assert alone.median > 10e3, "the network is really between the ranks: 256 KiB at 100 Mb/s take 21 ms"
    assert found.find("busbw", nics="100M/50M", backend="raw, all NICs").median == pytest.approx(18.75e-3, rel=0.3)
    assert found.find("lost_by_cut", nics="100M/50M").repetitions >= 1, printed
    assert "the same bits as without cuts" in printed
