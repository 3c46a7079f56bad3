"""tools/train/measure_sample_cache.py on few images: every case is measured, and written."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from support.tool_module import load_script

from bagua.net.bench.result_file import read_result


@pytest.mark.skipif(
    importlib.util.find_spec("PIL") is None, reason="needs Pillow, which decodes images: pip install pillow"
)
def test_it_measures_every_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # LitData, which takes seconds to start
    file = tmp_path / "result.json"
    words = ["--images", "64", "--repetitions", "1", "--workers", "0", "--json", str(file)]
    assert load_script("tools/train/measure_sample_cache.py").main(words) == 0
    cases = [("none", "plain"), ("lmdb", "cold"), ("lmdb", "warm")]
    cases += [("redis", "cold"), ("redis", "warm")] if shutil.which("redis-server") else []
    for metric in ("rate", "speedup", "rate_after_start"):
        found = read_result(file).select(metric)
        assert [(figure.case["backend"], figure.case["epoch"]) for figure in found] == cases
        assert all(figure.median > 0 for figure in found)
    with pytest.raises(SystemExit):
        load_script("tools/train/measure_sample_cache.py").main(["--json", str(tmp_path / "nowhere" / "result.json")])
    assert "does not exist" in capsys.readouterr().err
