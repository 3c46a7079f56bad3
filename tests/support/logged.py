"""What Bagua logs."""

from __future__ import annotations

import logging
from collections.abc import Callable


class Lines(logging.Handler):
    """Of a logger, from now on."""

    def __init__(self, level: int = logging.NOTSET, logger: str = "bagua") -> None:
        super().__init__(level)
        self.lines: list[str] = []
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def told_of(action: Callable[[], object]) -> list[str]:
    """Warnings of the logger `bagua`."""
    handler = Lines(logging.WARNING)
    try:
        action()
    finally:
        logging.getLogger("bagua").removeHandler(handler)
    return handler.lines
