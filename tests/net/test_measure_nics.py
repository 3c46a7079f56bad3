"""`measure nics`: ratios, what a cut costs; and a short run in an emulated network."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

_TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)

from netlab import missing_privilege, missing_tap_device  # noqa: E402

pytest.importorskip("torch", reason="needs PyTorch, which the ranks on GPUs use")

from measure.networks.comparison import Sample  # noqa: E402
from measure.nics import tool  # noqa: E402
from measure.nics.comparison import RAW_ALL, RAW_CASE, row_of, size_case, slower_lines  # noqa: E402
from measure.nics.cuts import Cut, lost_seconds  # noqa: E402
from measure.nics.setups import ALL, BEST, JOINED  # noqa: E402

from bagua.net.bench.result_file import read_result  # noqa: E402
from bagua.net.bench.turns import Turns  # noqa: E402

_LACKING = missing_privilege() or missing_tap_device()


def _turns(size_bytes: int, **seconds: list[float]) -> Turns[Sample]:
    found: Turns[Sample] = Turns()
    names = {"best": BEST.name, "every": ALL.name, "joined": JOINED.name}
    for variant, values in seconds.items():
        case, name = (RAW_CASE, RAW_ALL) if variant == "raw" else (size_case(size_bytes), names[variant])
        found.samples[case, name] = {
            number: Sample("x", case, name, number, value) for number, value in enumerate(values)
        }
    return found


def test_joined_nics_are_compared_with_the_others_and_with_raw_tcp() -> None:
    times = {"best": [0.4, 0.8, 0.8], "every": [0.2, 0.2, 0.2], "joined": [0.2, 0.2, 0.4]}
    row = row_of(_turns(100_000_000, raw=[1.0, 1.25], **times), "x", 100_000_000)
    assert row is not None
    assert (row.over[BEST.name].low, row.over[BEST.name].median, row.over[BEST.name].high) == (2, 2, 4)
    assert row.over[ALL.name].median == 1
    # 0.1 GB in 0.2 s, of 1 GB in 1.125 s.
    assert row.of_raw == pytest.approx(0.5 * 1.125)
    assert slower_lines([row]) == []


def test_a_cut_costs_the_longest_step_that_it_falls_into() -> None:
    def cut(began: float, returned: float) -> Cut:
        return Cut(0, 0, "link down", began, returned, None, returned)

    lengths = [1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    ended = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    assert lost_seconds([cut(1.5, 2.5), cut(7.2, 7.4)], ended, lengths, 1.0) == [3.0, 0.0]
    assert lost_seconds([cut(9.9, 10.9)], ended, lengths, 1.0) == [1.0], "noticed after its end"


@pytest.mark.deep
@pytest.mark.netns
@pytest.mark.timeout(240)
@pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
def test_the_best_nic_alone_and_all_are_measured_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    details, result = (tmp_path / name for name in ("details.json", "nics.json"))
    words = ["--networks", "100M/50M,100M/100M+2ms~1%", "--device", "cpu", "--sizes", "8,256K", "--rounds", "1"]
    words += ["--time-limit", "10", "--cuts", "4", "--down", "0.2"]
    code = tool.main([*words, "--details", str(details), "--json", str(result)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    rows = json.loads(details.read_text())["summary"]
    assert [(row["network"], row["size_bytes"]) for row in rows] == [
        (network, size) for network in ("100M/50M", "100M/100M+2ms~1%") for size in (8, 256 << 10)
    ]
    found = read_result(result)
    alone = found.find("time", nics="100M/50M", size_bytes=256 << 10, backend=BEST.name)
    assert alone.median > 10e3, "the network is really between the ranks: 256 KiB at 100 Mb/s take 21 ms"
    assert found.find("busbw", nics="100M/50M", backend="raw, all NICs").median == pytest.approx(18.75e-3, rel=0.3)
    assert found.find("lost_by_cut", nics="100M/50M").repetitions >= 1, printed
    assert "the same bits as without cuts" in printed
    assert not list(Path("/run/netns").glob(f"netlab-{os.getpid()}-*"))
