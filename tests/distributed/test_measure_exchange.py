"""tools/bench/measure_exchange.py: two real ranks, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port
from support.tool_module import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bench" / "measure_exchange.py"


def _run(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, SCRIPT, *words],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_ranks() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [_run("--sizes", "4K,12M", "--turns", "2", RANK=rank, **place) for rank in ("0", "1")]
    try:
        (output, error), (silent, _) = (rank.communicate(timeout=120) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], error
    assert silent == ""
    title, *_, small, large = output.splitlines()
    assert title.startswith("two ranks, gloo; ")
    assert (small.split()[:2], large.split()[:2]) == (["4", "KiB"], ["12", "MiB"])
    for line in (small, large):
        assert all(float(word) > 0 for word in line.split()[2:])
    assert len(small.split()) == 4


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        ((), "3", "WORLD_SIZE=3: this is between two ranks"),
        (("--sizes", "4K,6"), "2", "6 bytes are no number of floats; give multiples of 4"),
        (("--turns", "0"), "2", "argument --turns"),
    ],
)
def test_wrong_options(
    words: tuple[str, ...],
    world_size: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(SystemExit) as ended:
        load_script("tools/bench/measure_exchange.py").main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
