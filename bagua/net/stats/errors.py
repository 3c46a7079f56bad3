"""What goes wrong while pages are read."""

from __future__ import annotations


class StatsError(Exception):
    """One process or host that cannot be shown; the message says which, why, and what to do."""


class NotAReportError(StatsError):
    """What was received is not a report of `bagua-net stats --json`: `why`."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why
