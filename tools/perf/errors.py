"""The one error of this program."""

from __future__ import annotations


class PerfError(RuntimeError):
    """The comparison cannot be made; the text names the value, the cause and the remedy."""
