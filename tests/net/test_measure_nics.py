"""`measure nics`: a short run in an emulated network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)

from netlab import missing_privilege, missing_tap_device  # noqa: E402

pytest.importorskip("torch", reason="needs PyTorch, which the ranks on GPUs use")

from measure.nics import tool  # noqa: E402

from bagua.net.bench.result_file import read_result  # noqa: E402

_LACKING = missing_privilege() or missing_tap_device()


@pytest.mark.deep
@pytest.mark.netns
@pytest.mark.timeout(240)
@pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
def test_the_best_nic_alone_and_all_are_measured_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "nics.json"
    words = ["--networks", "100M/50M,100M/100M+2ms~1%", "--device", "cpu", "--sizes", "8,256K", "--rounds", "1"]
    words += ["--time-limit", "120", "--cuts", "4", "--down", "0.2"]
    code = tool.main([*words, "--json", str(result)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    found = read_result(result)
    times = {(one.case["nics"], one.case["size_bytes"]) for one in found.select("time", backend=tool.JOINED)}
    assert times == {(network, size) for network in ("100M/50M", "100M/100M+2ms~1%") for size in (8, 256 << 10)}
    alone = found.find("time", nics="100M/50M", size_bytes=256 << 10, backend=tool.BEST)
    assert alone.median > 10e3, "the network is really between the ranks: 256 KiB at 100 Mb/s take 21 ms"
    assert found.find("busbw", nics="100M/50M", backend="raw, all NICs").median == pytest.approx(18.75e-3, rel=0.3)
    assert found.find("lost_by_cut", nics="100M/50M").repetitions >= 1, printed
    assert "the same bits as without cuts" in printed
