"""`measure cache` on few images: every case is measured, and written."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from bagua.net.bench.result_file import read_result

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))


@pytest.mark.deep
@pytest.mark.skipif(
    importlib.util.find_spec("PIL") is None, reason="needs Pillow, which decodes images: pip install pillow"
)
def test_it_measures_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from measure import cache

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # LitData, which takes seconds to start
    file = tmp_path / "result.json"
    words = ["--images", "64", "--rounds", "1", "--workers", "0", "--json", str(file)]
    assert cache.main(words) == 0
    cases = [("none", "plain"), ("lmdb", "cold"), ("lmdb", "warm")]
    cases += [("redis", "cold"), ("redis", "warm")] if shutil.which("redis-server") else []
    for metric in ("rate", "speedup", "rate_after_start"):
        found = read_result(file).select(metric)
        assert [(figure.case["backend"], figure.case["epoch"]) for figure in found] == cases
        assert all(figure.median > 0 for figure in found)
