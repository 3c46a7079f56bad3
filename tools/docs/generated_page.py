"""The command line of a script that generates a page: write it, or check that it is current."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run(description: str, page: Path, render: Callable[[], str], arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if `--check` found a difference."""
    parser = argparse.ArgumentParser(  # the callers give their docstring
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = description
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--page", type=Path, default=page, metavar="FILE", help=f"the page (default: {page.name})")
    options = parser.parse_args(arguments)

    expected = render()
    if not options.check:
        try:
            options.page.write_text(expected, encoding="utf-8")
        except OSError as error:
            parser.error(f"--page {str(options.page)!r} cannot be written ({error.strerror}); choose another path")
        return 0
    actual = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    difference = difflib.unified_diff(
        actual.splitlines(keepends=True), expected.splitlines(keepends=True), str(options.page), "what it should be"
    )
    sys.stdout.writelines(difference)
    if actual != expected:
        print(f"{options.page} is out of date; run: make docs", file=sys.stderr)
    return int(actual != expected)
