"""Aligned plain text: two head lines (title, unit), then a line a row; bold and colour only where a terminal shows
them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bagua.net.bench.table import BOLD, DIM, LOUD, MISSING, RESET

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    title: str
    unit: str
    cell: Callable[[Row], str]
    left: bool = False
    optional: bool = False  # left out when no row has a value


def render(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    *,
    block: Callable[[Row], Hashable],
    is_loud: Callable[[Row], bool],
    colour: bool = False,
) -> str:
    """
    Args:
        block: a blank line separates rows that differ in it.
        is_loud: what a colour terminal shows in white on red.
    """
    cells = [[column.cell(row) for row in rows] for column in columns]
    shown = [
        (column, texts)
        for column, texts in zip(columns, cells, strict=True)
        if not column.optional or any(text not in ("", MISSING) for text in texts)
    ]
    widths = [max(len(text) for text in (column.title, column.unit, *texts)) for column, texts in shown]

    def line(texts: Sequence[str]) -> str:
        parts = [
            text.ljust(width) if column.left else text.rjust(width)
            for text, width, (column, _) in zip(texts, widths, shown, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = [line([column.title for column, _ in shown]), line([column.unit for column, _ in shown])]
    lines = [f"{BOLD}{head[0]}{RESET}", f"{DIM}{head[1]}{RESET}"] if colour else head
    for number, row in enumerate(rows):
        if number and block(rows[number - 1]) != block(row):
            lines.append("")
        text = line([texts[number] for _, texts in shown])
        lines.append(f"{LOUD}{text}{RESET}" if colour and is_loud(row) else text)
    return "\n".join(lines)
