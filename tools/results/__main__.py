"""`make docs` runs `python -m results` with tools/ on PYTHONPATH."""

from __future__ import annotations

from pathlib import Path

from .pages import PAGES, fill, load_results
from .plots import write_plots

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    results = load_results(ROOT / "docs" / "results")
    for page in PAGES:
        path = ROOT / page
        path.write_text(fill(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    write_plots(ROOT / "docs" / "images", results)


main()
