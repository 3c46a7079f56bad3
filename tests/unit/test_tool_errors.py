"""What scripts of tools/ say to a user who starts them wrongly: a sentence with the remedy, and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.tool_module import load_script

pytest.importorskip("torch", reason="needs PyTorch, which these scripts measure")
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure import compression

from bagua.net.bench.result_file import read_result


def test_comparison_of_codecs_has_a_row_for_each_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compression.json"
    words = ["--device", "cpu", "--elements", "64K", "--dtypes", "f32", "--versions", "2", "--threads", "1"]
    codecs = ["int4", "int8"]
    assert compression.main([*words, "--codecs", ",".join(codecs), "--rounds", "3", "--json", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith("1 ")]
    expected = [(codec, operation) for codec in codecs for operation in ("compress", "decompress", "reduce")]
    assert [(row[1], row[2]) for row in rows] == expected
    for metric in ("time", "of_copy"):
        found = read_result(path).select(metric)
        assert [(one.case["codec"], str(one.case["operation"]).removesuffix(" 2")) for one in found] == expected
        assert all(one.median > 0 and one.repetitions == 3 for one in found)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--backend", "nccl"], "--backend nccl needs a GPU for each rank, and torch sees none; use --backend gloo"),
        (["--json", "/nonexistent/x.json"], "folder /nonexistent does not exist; create it first"),
    ],
)
def test_example_says_at_once_what_would_end_it_later(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", *words])
    with pytest.raises(SystemExit) as ended:
        load_script("examples/ddp_train.py").parse_arguments()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
