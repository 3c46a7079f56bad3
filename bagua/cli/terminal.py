"""How text is shown: width, colour only where somebody looks at a terminal, and tables that fit it: columns that do not
fit are left out, and what is too wide alone is cut."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH_ELSEWHERE = 80
_MAX_WIDTH = 100
_GAP = "  "
_MIN_CELL = 8


def width_of_stdout() -> int | None:
    """In columns; None: it is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass(frozen=True)
class Terminal:
    width: int
    is_coloured: bool

    @classmethod
    def of_stdout(cls) -> Terminal:
        """https://no-color.org: any value of NO_COLOR switches colour off."""
        if not sys.stdout.isatty():
            return cls(_WIDTH_ELSEWHERE, False)
        has_colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        return cls(max(40, min(_MAX_WIDTH, shutil.get_terminal_size().columns)), has_colour)

    def coloured(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.is_coloured else text

    def bold(self, text: str) -> str:
        return self.coloured(text, "1")

    def dim(self, text: str) -> str:
        return self.coloured(text, "2")

    def wrapped(self, text: str, indent: str, first: str | None = None) -> str:
        """Paths and variable names are never cut: they are there to be copied."""
        return textwrap.fill(
            text,
            self.width,
            initial_indent=indent if first is None else first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def columns(self, rows: Sequence[Sequence[str]], indent: str) -> str:
        """A table whose first row is the head; the last column wraps. A list, where only that would have room."""
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        if len(indent) + sum(widths) + len("  ") * len(widths) >= self.width:
            return self._list(rows, indent)
        lines = []
        for number, row in enumerate(rows):
            start = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
            if number == 0:
                lines.append(self.dim((start + row[-1]).rstrip()))
            elif len(start) > self.width - 20:
                lines.append((start + row[-1]).rstrip())
            else:
                lines.append(self.wrapped(row[-1], " " * len(start), start).rstrip())
        return "\n".join(lines)

    def _list(self, rows: Sequence[Sequence[str]], indent: str) -> str:
        head, *items = rows
        lines = []
        for first, *others in items:
            cells = zip(head[1:], others, strict=True)
            named = [f"{name} {cell}".strip() for name, cell in cells if cell not in ("", "-")]
            lines.append(self.wrapped(first, indent))
            lines.append(self.wrapped(", ".join(named), indent + "  "))
        return "\n".join(lines)


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
