"""Arithmetic of time intervals: unions and overlaps. Pure; any unit, as long as it is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]  # begin <= end


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Disjoint and in order. Intervals not more than `gap` apart become one."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin - joined[-1][1] <= gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(disjoint: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in disjoint)


def overlap(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """How long both are under way; each of them disjoint and in order, as `union` gives them."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        # Whichever ends first can meet nothing further.
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
