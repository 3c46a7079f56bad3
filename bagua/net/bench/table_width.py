"""Which columns a narrow terminal has room for."""

from __future__ import annotations

from collections.abc import Callable

# What says least where the others are shown goes first. Size, backend, busbw and whether the data was right always
# stay.
_DROPPED = ("min..max", "p99", "algbw", "CPU", "p50", "of raw", "note", "time")


def fitting(rendered: Callable[[set[str]], str], width: int | None) -> set[str]:
    """The titles of the columns to leave out.

    Args:
        rendered: the table without these, and without colour.
        width: of the terminal; None: there is none.
    """
    left_out: set[str] = set()
    for title in _DROPPED:
        if width is None or max(map(len, rendered(left_out).splitlines()), default=0) <= width:
            break
        left_out.add(title)
    return left_out
