"""A table that fits its terminal: columns that do not fit are left out, and what is too wide alone is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.cli.terminal import Terminal

_GAP = "  "
_MIN_CELL = 8


@dataclass(frozen=True)
class Column:
    title: str
    cells: Sequence[str]
    rank: int = 0  # columns of the highest rank are left out first, those of rank 0 never
    left: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def table(columns: Sequence[Column], terminal: Terminal, width: int | None, indent: str = "") -> tuple[str, int]:
    """The text, and how many columns were left out of it.

    Args:
        terminal: whether to dim the head.
        width: in columns of the terminal; None: as wide as it gets.
    """
    shown = list(columns)

    def too_wide() -> int:
        whole = len(indent) + sum(column.width for column in shown) + len(_GAP) * (len(shown) - 1)
        return 0 if width is None else max(0, whole - width)

    while too_wide() and (last := max(shown, key=lambda column: column.rank)).rank > 0:
        shown.remove(last)
    widths = [column.width for column in shown]
    widest = widths.index(max(widths))
    widths[widest] = max(min(_MIN_CELL, widths[widest]), widths[widest] - too_wide())

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell[:room].ljust(room) if column.left else cell[:room].rjust(room)
            for column, cell, room in zip(shown, cells, widths, strict=True)
        )
        return (indent + _GAP.join(padded)).rstrip()[:width]

    rows = zip(*(column.cells for column in shown), strict=True)
    lines = [terminal.dim(line([column.title for column in shown])), *(line(row) for row in rows)]
    return "\n".join(lines), len(columns) - len(shown)
