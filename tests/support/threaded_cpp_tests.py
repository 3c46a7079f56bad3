"""Which C++ tests can start threads: the others give ThreadSanitizer nothing to see.

Decided by what a test includes, over any number of steps: without <thread> and without the built plugin there is none.
"""

from __future__ import annotations

import re
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_TESTS = _REPOSITORY / "tests" / "cpp"
_ROOTS = (_TESTS, _REPOSITORY / "net_plugin", _REPOSITORY / "tools")
_INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^">]+)[">]', re.MULTILINE)
# They open the plugin as NCCL does.
_LOADS_PLUGIN = "abi_"


def starts_threads(source: Path) -> bool:
    return source.stem.startswith(_LOADS_PLUGIN) or "thread" in _all_includes(source)


def _all_includes(source: Path) -> set[str]:
    """What a test and the headers of this repository that it includes name; of a header, its .cc file counts, too."""
    return {name for path in files_included(source) for name in _names_included(path)}


def files_included(source: Path) -> set[Path]:
    """The test, the headers of this repository that it includes over any number of steps, and their .cc files."""
    waiting = [source]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        for name in _names_included(path):
            for root in _ROOTS:
                waiting += [root / name, (root / name).with_suffix(".cc")]
    return seen


def _names_included(path: Path) -> list[str]:
    return _INCLUDE.findall(path.read_text(encoding="utf-8"))
