"""The committed pages are what the generator makes of the committed result files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))

from results.pages import PAGES, fill, load_results  # noqa: E402

RESULTS = load_results(REPOSITORY / "docs" / "results")


@pytest.mark.parametrize("page", PAGES)
def test_committed_tables_are_those_of_the_result_files(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    assert fill(text, RESULTS) == text, "run make docs"
