"""What scripts of tools/ say to a user who starts them wrongly: a sentence with the remedy, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.tool_module import load_script

pytest.importorskip("torch", reason="needs PyTorch, which these scripts measure")
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def told(capsys: pytest.CaptureFixture[str], path: str, *words: str) -> str:
    """What it says on stderr, having found fault with its command line."""
    module = load_script(f"tools/{path}")
    with pytest.raises(SystemExit) as ended:
        module.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cuda"], "--device cuda needs a GPU, and torch sees none"),
        (["--device", "cpu", "--tune"], "--tune is about kernels on CUDA devices"),
        (["--device", "cpu", "--single-calls"], "--single-calls is about kernels on CUDA devices"),
        (["--device", "cpu", "--dtypes", "f32,f64"], "--dtypes names ['f64']"),
        (["--device", "cpu", "--elements", "0"], "--elements: '0' has a 0; give 1 or more"),
        (["--device", "cpu", "--versions", "2,0"], "--versions: '2,0' has a 0; give 1 or more"),
        (["--device", "cpu", "--threads", "0"], "--threads: '0' has a 0; give 1 or more"),
        (["--device", "cpu", "--blocks", "none,x"], "--blocks: 'x' is not an integer; give one in 1..1073741824"),
        (["--device", "cpu", "--blocks", "0"], "--blocks: 0 is outside 1..1073741824"),
        (["--device", "cpu", "--json", "/nonexistent/x.json"], "folder '/nonexistent' does not exist"),
    ],
)
def test_comparison_of_kernels(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert says in told(capsys, "kernels/compare_minmax_uint8.py", *words)


def test_comparison_of_kernels_prints_a_row_once_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    module = load_script("tools/kernels/compare_minmax_uint8.py")
    words = ["--device", "cpu", "--elements", "64K", "--dtypes", "f32", "--versions", "2", "--threads", "1"]
    assert module.main([*words, "--rounds", "3"]) == 0
    printed = capsys.readouterr()
    title, head, *rows = printed.out.splitlines()
    assert title.startswith("MinMaxUInt8 compared with a copy")
    assert head.split()[:2] == ["threads", "operation"]
    assert [row.split()[1] for row in rows] == ["compress", "decompress", "reduce"]
    assert len(printed.err.splitlines()) == len(rows), "progress"


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


def test_page_of_settings_that_cannot_be_written() -> None:
    pytest.importorskip("bagua.net._core", reason="needs the compiled library")
    command = [sys.executable, "-m", "generate_settings", "--page", "/nonexistent/settings.md"]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS / "docs")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "--page '/nonexistent/settings.md' cannot be written (No such file or directory)" in done.stderr
