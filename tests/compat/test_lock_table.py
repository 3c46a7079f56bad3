"""The table of locks on the design page names every mutex of the plugin, and nothing else."""

from __future__ import annotations

import re

from support.import_arrows import REPOSITORY

PLUGIN = REPOSITORY / "net_plugin"
PAGE = REPOSITORY / "docs/design/threads-and-messages.md"
MUTEX_HEADER = PLUGIN / "base/mutex.h"

SOURCES = sorted(path for path in PLUGIN.rglob("*") if path.suffix in {".h", ".cc"} and path != MUTEX_HEADER)


def mutexes_of(text: str) -> list[str]:
    """`Class::member` of every mutex that is declared. The class is the last one that is indented less."""
    found = []
    classes: list[tuple[int, str]] = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if opened := re.match(r"\s*(?:class|struct)\s+(\w+)[^;]*$", line):
            classes = [(depth, name) for depth, name in classes if depth < indent] + [(indent, opened[1])]
        if declared := re.match(r"\s*(?:mutable )?(?:Loop)?Mutex (\w+);", line):
            found.append(f"{[name for depth, name in classes if depth < indent][-1]}::{declared[1]}")
    return found


def rows_of_the_page() -> dict[str, int]:
    """The order of each lock, by its name."""
    section = PAGE.read_text().split("\n## Locks\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \|.*\| (\d+) \|$", section, re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows})
    return {name: int(order) for name, order in rows}


def test_the_table_names_every_mutex() -> None:
    declared = [name for path in SOURCES for name in mutexes_of(path.read_text())]
    assert sorted(declared) == sorted(rows_of_the_page())


def test_the_table_is_in_the_order_in_which_locks_are_taken() -> None:
    orders = list(rows_of_the_page().values())
    assert orders == sorted(orders)


def test_every_lock_is_one_that_clang_checks() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert re.findall(r"std::(?:\w*mutex|lock_guard|unique_lock|scoped_lock)\b", text) == [], path
        for name in mutexes_of(text):
            assert f"GUARDED_BY({name.split('::')[1]})" in text, f"{name} in {path} guards no member that is marked"


def test_a_mutex_belongs_to_the_innermost_class() -> None:
    text = """
class A {
  struct B {
    Mutex one;
  };
  LoopMutex two_;  // why
};
class C;
struct D : E {
  Mutex three_;
};
"""
    assert mutexes_of(text) == ["B::one", "A::two_", "D::three_"]
