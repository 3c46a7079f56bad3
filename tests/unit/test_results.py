"""The committed pages are what the generator makes of the committed result files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

from results.pages import PAGES, fill, load_results  # noqa: E402
from results.publish import compact  # noqa: E402

from bagua.net.bench.result_file import Figure  # noqa: E402

RESULTS = load_results(REPOSITORY / "docs" / "results")


@pytest.mark.parametrize("page", PAGES)
def test_committed_tables_are_those_of_the_result_files(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert fill(text, RESULTS) == text, "run make docs"


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no section 'speed'; there are headline"):
        fill("<!-- figures: speed -->\n<!-- /figures -->\n", RESULTS)


def test_a_published_file_has_the_best_of_the_hand_tuned_settings_with_rounded_figures() -> None:
    def one(metric: str, median: float, spread: float | None = None, **case: str) -> Figure:
        low, high = (None, None) if spread is None else (median - spread, median + spread)
        labels = {"collective": "all_reduce", "size_bytes": 8, **case}
        return Figure(labels, metric, "", median, low, high, 1 if spread is None else 3)

    raw = (
        one("time", 42.7247, 0.5, backend="nccl"),
        one("time", 12345.6, 2.0, backend="plugin"),
        one("cpu", 0.0378123, backend="plugin"),
        one("latency_p99", 5.0, backend="plugin"),
        one("time", 41.0, 0.5, backend="nccl_t2s4"),
        one("speedup", 1.3456, 0.1, backend="plugin", baseline="nccl_t2s4"),
        one("speedup", 1.3456, 0.1, backend="plugin", baseline="nccl_tuned_best"),
        one("time", 41.0, 0.5, backend="nccl_tuned_best", setting="t2s4"),
    )
    seen = [(f.metric, f.case["backend"], f.median, f.low, f.high, f.repetitions) for f in compact(raw)]
    assert seen == [
        ("time", "nccl", 42.7, 42.2, 43.2, 3),
        ("time", "nccl_tuned_best", 41.0, 40.5, 41.5, 3),
        ("time", "plugin", 12346, 12344, 12348, 3),
        ("speedup", "plugin", 1.35, 1.25, 1.45, 3),
        ("cpu", "plugin", 0.0378, None, None, None),
    ]
