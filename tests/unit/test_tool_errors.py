"""What scripts of tools/ say to a user who starts them wrongly: a sentence with the remedy, and no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.tool_module import load_script

pytest.importorskip("torch", reason="needs PyTorch, which these scripts measure")
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))


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
