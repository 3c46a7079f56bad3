"""Experts of a mixture in states: each rank has its own under local numbers, files have them under global ones.

Expert i of rank r is expert r * n + i of all, where each rank has n. Functions of names and states.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_EXPERT = re.compile(r"^((?:.*\.)?bagua_moe\.experts\.bagua_experts\.)(\d+)(\..*)$")


def local_counts(names: Iterable[str]) -> dict[str, int]:
    """How many experts this rank has in each layer: by the layer's prefix, the part of the name in front of the
    number. Empty for other models."""
    counts: dict[str, int] = {}
    for name in names:
        match = _EXPERT.match(name)
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def expert_of(name: str, rank: int, counts: Mapping[str, int]) -> int | None:
    """The global number of the expert that a local name belongs to; None: to none."""
    match = _EXPERT.match(name)
    return rank * counts[match[1]] + int(match[2]) if match else None


def global_name(name: str, rank: int, counts: Mapping[str, int]) -> str:
    """A local name as it is in files."""
    match = _EXPERT.match(name)
    return f"{match[1]}{rank * counts[match[1]] + int(match[2])}{match[3]}" if match else name


def owner_of(name: str, counts: Mapping[str, int]) -> int:
    """The rank that has the state of a global name, where ranks have these many experts. 0: all ranks have it."""
    match = _EXPERT.match(name)
    return int(match[2]) // counts[match[1]] if match else 0


def split(
    state: Mapping[str, Any], rank: int, counts: Mapping[str, int]
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A model's state without experts, and that of each expert by its global number, under global names."""
    rest: dict[str, Any] = {}
    experts: dict[int, dict[str, Any]] = {}
    for name, value in state.items():
        expert = expert_of(name, rank, counts)
        if expert is None:
            rest[name] = value
        else:
            experts.setdefault(expert, {})[global_name(name, rank, counts)] = value
    return rest, experts
