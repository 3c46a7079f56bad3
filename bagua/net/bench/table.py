"""The result table: aligned plain text, with bold and colour only where a terminal shows them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TextIO, TypeVar

from bagua.net.bench.measurement import Measurement
from bagua.net.bench.sizes import format_size

BOLD = "\x1b[1m"
DIM = "\x1b[2m"
LOUD = "\x1b[1;97;41m"
RESET = "\x1b[0m"

MISSING = "-"

Row = TypeVar("Row")


def shows_colour(stream: TextIO) -> bool:
    """A terminal that did not ask for plain text (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def format_time_us(value: float) -> str:
    """Three to four significant digits: 9.38, 93.8, 938, 9380."""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def format_bandwidth(value: float) -> str:
    """GB/s; significant digits where there is little of it, so that an 8-byte row is not 0.00."""
    if value >= 10:
        return f"{value:.1f}"
    if value >= 1:
        return f"{value:.2f}"
    return f"{value:.3f}" if value >= 0.1 else f"{value:.2g}"


def format_cpu(value: float) -> str:
    """s/GB: thousands at a few bytes, where it is the cost of a message, and 0.2 where it is the cost of bytes."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _optional(value: float | None, style: Callable[[float], str]) -> str:
    return MISSING if value is None else style(value)


@dataclass(frozen=True)
class Column(Generic[Row]):
    title: str
    unit: str
    cell: Callable[[Row], str]
    left: bool = False
    optional: bool = False  # left out when no row has a value


def render_rows(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    *,
    begins_block: Callable[[Row, Row], bool] = lambda _before, _row: False,
    is_loud: Callable[[Row], bool] = lambda _row: False,
    colour: bool = False,
) -> str:
    """A head line of titles and, if there are any, one of units; then one line a row.

    Args:
        begins_block: of a row and the next, between which a blank line is then.
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

    head = line([column.title for column, _ in shown])
    lines = [f"{BOLD}{head}{RESET}" if colour else head]
    if units := line([column.unit for column, _ in shown]):
        lines.append(f"{DIM}{units}{RESET}" if colour else units)
    for number, row in enumerate(rows):
        if number and begins_block(rows[number - 1], row):
            lines.append("")
        text = line([texts[number] for _, texts in shown])
        lines.append(f"{LOUD}{text}{RESET}" if colour and is_loud(row) else text)
    return "\n".join(lines) + "\n"


COLUMNS: tuple[Column[Measurement], ...] = (
    Column("size", "", lambda m: format_size(m.bytes)),
    Column("backend", "", lambda m: m.backend, left=True),
    Column("time", "us", lambda m: format_time_us(m.time_us)),
    Column("min..max", "us", lambda m: f"{format_time_us(m.time_min_us)}..{format_time_us(m.time_max_us)}"),
    Column("algbw", "GB/s", lambda m: format_bandwidth(m.algbw_gb_s)),
    Column("busbw", "GB/s", lambda m: format_bandwidth(m.busbw_gb_s)),
    Column("p50", "us", lambda m: _optional(m.latency_us(50), format_time_us), optional=True),
    Column("p99", "us", lambda m: _optional(m.latency_us(99), format_time_us), optional=True),
    Column("CPU", "s/GB", lambda m: _optional(m.cpu_s_per_gb, format_cpu), optional=True),
    Column(
        "of raw",
        "%",
        lambda m: _optional(m.share_of_raw, lambda v: f"{v * 100:.2g}" if v < 0.1 else f"{v * 100:.0f}"),
        optional=True,
    ),
    Column("verified", "", lambda m: {None: MISSING, True: "yes", False: "NO"}[m.verified]),
    Column("note", "", lambda m: m.note, left=True, optional=True),
)


def begins_block(before: Measurement, row: Measurement) -> bool:
    # Raw TCP stands beside the collective whose limit it is.
    other_collective = before.collective != row.collective and "one_way" not in (before.collective, row.collective)
    return before.bytes != row.bytes or other_collective


def render_table(measurements: Iterable[Measurement], *, colour: bool = False) -> str:
    """A blank line is where the size or collective changes."""
    rows = list(measurements)
    return render_rows(
        rows, COLUMNS, begins_block=begins_block, is_loud=lambda row: row.verified is False, colour=colour
    )
