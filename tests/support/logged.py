"""What Bagua logs."""

from __future__ import annotations

import logging
from collections.abc import Callable


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def told_of(action: Callable[[], object]) -> list[str]:
    """Warnings of the logger `bagua`."""
    handler = _Warnings()
    logging.getLogger("bagua").addHandler(handler)
    try:
        action()
    finally:
        logging.getLogger("bagua").removeHandler(handler)
    return handler.lines
