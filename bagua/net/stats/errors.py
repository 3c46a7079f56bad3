"""What goes wrong while pages are read."""

from __future__ import annotations


class StatsError(Exception):
    """One process or host that cannot be shown; the message says which, why, and what to do."""
