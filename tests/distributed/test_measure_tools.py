"""The small tools of tools/measure with real ranks and few steps: each measures all its variants, and writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.__main__ import TOOLS, main

from bagua.net.bench.result_file import ResultFile, read_result


def measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> ResultFile:
    path = tmp_path / "result.json"
    code = main([*words, "--json", str(path)])
    assert code == 0, capsys.readouterr()
    return read_result(path)


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_samplers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(tmp_path, capsys, "balance", "--samples", "64", "--batch-size", "4", "--rounds", "1")
    for metric in ("imbalance", "padding", "busiest_cpu_time", "time", "speedup"):
        found = {(one.case["sampler"], one.case["form"]): one.median for one in result.select(metric)}
        assert len(found) == 8
        assert min(found.values()) > 0
    plain, balanced = (
        result.find("imbalance", sampler=name, form="packed").median for name in ("distributed", "load_balancing")
    )
    assert 1 <= balanced < plain
    assert result.find("speedup", sampler="distributed", form="packed").median == 1


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_mixtures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("moe", "--device", "cpu", "--hidden", "16", "--tokens", "32", "--layers", "1", "--rounds", "2")
    result = measured(tmp_path, capsys, *words)
    assert {one.case["layer"]: one.repetitions for one in result.select("step_time")} == {
        "dense": 2,
        "moe": 2,
        "all_to_all": 2,
    }
    assert result.find("slowdown", layer="moe").median > 0
    assert result.find("all_to_all_share").unit == "%"


def test_optimizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--optimizers", "sgd", "--gradients", "fresh", "--parameters", "3", "--steps", "6", "--rounds", "2")
    result = measured(tmp_path, capsys, "optimizers", *words)
    case = {"optimizer": "sgd", "gradients": "fresh", "parameters": 3, "elements": 256, "device": "cpu"}
    assert len(result.select("step_time", **case)) == 6
    ours = [(one.case["backend"], one.case["baseline"]) for one in result.select("speedup", backend="fuse_step")]
    assert ours == [("fuse_step", "for_loop"), ("fuse_step", "foreach")]


@pytest.mark.deep
def test_codecs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--device", "cpu", "--elements", "64K", "--dtypes", "f32", "--versions", "2", "--threads", "1")
    result = measured(tmp_path, capsys, "compression", *words, "--codecs", "int4,int8", "--rounds", "3")
    for metric in ("time", "of_copy"):
        found = result.select(metric)
        assert {one.case["codec"] for one in found} == {"int4", "int8"}
        assert len(found) == 12, "compress, decompress, reduce and what FSDP2 does in one kernel, of each"
        assert all(one.median > 0 and one.repetitions == 3 for one in found)


def test_tools_are_listed_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in TOOLS)
    assert main(["balances"]) == 2
    assert "unknown tool 'balances'" in capsys.readouterr().err
