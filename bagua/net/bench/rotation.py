"""Whose turn it is to begin, where backends are measured one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Runner = TypeVar("_Runner")


def rotated(sessions: Sequence[_Runner], turn: int) -> list[_Runner]:
    """Whoever runs first finds the caches and the CPU's clock as another left them; each takes its turn."""
    if not sessions:
        return []
    start = turn % len(sessions)
    return [*sessions[start:], *sessions[:start]]
