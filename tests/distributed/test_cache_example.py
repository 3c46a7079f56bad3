"""examples/cache_samples.py in two ranks: the first epoch prepares each sample once, and a second run none."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
from support.ranks import run_ranks
from support.tool_module import load_script


def _printed(*words: str) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_script("examples/cache_samples.py").main(words)
    return printed.getvalue().splitlines()


@pytest.mark.skipif(
    importlib.util.find_spec("PIL") is None, reason="needs Pillow, which decodes images: pip install pillow"
)
def test_samples_are_prepared_once(tmp_path: Path) -> None:
    words = ["--folder", str(tmp_path), "--images", "64", "--epochs"]
    first, nothing = run_ranks(2, _printed, *words, "2")
    assert nothing == [], "rank 0 alone prints"
    second, _ = run_ranks(2, _printed, *words, "1")
    counts = [re.findall(r"(\d+) (?:hits|misses)", line) for line in first + second]
    assert counts[0] == ["0", "32"]
    assert counts[2] == ["32", "0"]
    # The other rank has written its samples already, or not before its worker ends.
    assert sum(map(int, counts[1])) == 32
