"""Progress on stderr: one line redrawn on a terminal, single plain lines elsewhere. stdout stays the result's."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Self, TextIO

_REDRAW_S = 0.1
_PLAIN_LINE_S = 10.0
_BAR_WIDTH = 24
_CLEAR_LINE = "\r\x1b[2K"


class Progress:
    """Counts steps of a known total. Single-threaded: the caller's loop advances it."""

    def __init__(self, total: int, *, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._total = max(total, 1)
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._live = self._stream.isatty()
        self._began = time.monotonic()
        self._last_drawn = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def advance(self, what: str, steps: int = 1) -> None:
        """`what` is under way now; `steps` of the total ended."""
        self._done = min(self._done + steps, self._total)
        self._draw(what)

    def message(self, text: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._live and not self._quiet:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()
        self._last_drawn = float("-inf") if self._live else self._last_drawn

    def _draw(self, what: str) -> None:
        now = time.monotonic()
        if self._quiet or now - self._last_drawn < (_REDRAW_S if self._live else _PLAIN_LINE_S):
            return
        self._last_drawn = now
        share = self._done / self._total
        elapsed = now - self._began
        remaining = f", {elapsed / share - elapsed:.0f} s left" if share > 0.02 else ""
        if self._live:
            filled = int(share * _BAR_WIDTH)
            bar = "#" * filled + "." * (_BAR_WIDTH - filled)
            text = f"[{bar}] {share:4.0%} {what}{remaining}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(_CLEAR_LINE + text[:width])
        else:
            self._stream.write(f"{share:4.0%} {what}, {elapsed:.0f} s{remaining}\n")
        self._stream.flush()
