"""Tables of the commands: they fit the terminal."""

from __future__ import annotations

import pytest

from bagua.cli.terminal import Terminal
from bagua.cli.text_table import Column, table

COLUMNS = [
    Column("name", ["a name that alone is wider than a narrow terminal", "b"], left=True),
    Column("each run", ["1 2 3 4 5 6 7 8 9", "1"], 1, left=True),
    Column("speed", ["1.00x", "10.00x"]),
]


@pytest.mark.parametrize(("width", "left_out"), [(None, 0), (76, 0), (75, 1), (40, 1), (20, 1)])
def test_columns_are_left_out_and_then_cut(width: int | None, left_out: int) -> None:
    text, hidden = table(COLUMNS, Terminal(80, False), width)
    head, first, second = text.splitlines()
    assert hidden == left_out
    assert max(map(len, text.splitlines())) <= (width or 1000)
    assert first.endswith("1.00x")
    assert second.endswith("10.00x")
    assert ("each run" in head) is (left_out == 0)


def test_a_table_may_be_empty() -> None:
    assert table([Column("name", [])], Terminal(80, False), 40) == ("name", 0)
