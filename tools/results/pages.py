"""Fills the marked sections of Markdown pages: <!-- figures: NAME --> ... <!-- /figures -->."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bagua.net.bench.api import ResultFile, read_result

from .reference import Results, reference
from .sections import choice, current, losses, networks, other_losses

PAGES = (
    *("README.md", "docs/index.md", "docs/how-to/what-should-i-use.md"),
    *("docs/benchmarks.md", "docs/reference/results.md"),
)
SECTIONS: Mapping[str, Callable[[Results], str]] = {
    "choice": choice,
    "current": current,
    "losses": losses,
    "networks": networks,
    "other-losses": other_losses,
    "reference": reference,
}
_SECTION = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def load_results(folder: Path) -> dict[str, ResultFile]:
    """The result files of a folder, by name without .json."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.json"))}


def fill(page: str, results: Results) -> str:
    """The page with its marked sections made anew.

    Raises:
        ValueError: a marker names no section.
        LookupError: a result file or a figure is missing.
    """

    def section(match: re.Match[str]) -> str:
        name = match[2]
        if name not in SECTIONS:
            raise ValueError(f"no section {name!r}; there are {', '.join(SECTIONS)}")
        return f"{match[1]}{SECTIONS[name](results)}\n{match[3]}"

    return _SECTION.sub(section, page)
