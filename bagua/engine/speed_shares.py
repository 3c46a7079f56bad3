"""Shares of work by the speed of ranks: of the samples of a global batch, or of the steps of a round.

Speed is work by the time of computing, without what a rank waits for (bagua.engine.step_statistics). Shares change
where that makes all faster by _WORTH at least: noise of equal ranks does not move them. Without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LEAST_STEPS = 4  # that a speed is of

_WORTH = 0.05


def shares_of(given: str | Sequence[float], ranks: int | None = None) -> list[float]:
    """What a user gives as `shares`, by rank: "auto" begins with equal ones.

    Args:
        ranks: how many there are; None: not known yet.

    Raises:
        TypeError: it is neither a word nor numbers.
        ValueError: it is another word, or not a positive number for each rank.
    """
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(f'shares={given!r} is unknown. Pass "auto", or a number for each rank.')
        return [1.0] * (ranks or 1)
    numbers: Any = given
    if not isinstance(numbers, Sequence) or any(isinstance(one, str | bool | None) for one in numbers):
        raise TypeError(f'shares is {given!r}. Pass "auto", or a number for each rank, such as [2, 1].')
    shares = [float(one) for one in given]
    if len(shares) != (ranks or len(shares)) or not all(0 < one < math.inf for one in shares):
        count = "" if ranks is None else f"{ranks} "
        raise ValueError(f"shares={given!r} must be {count}positive numbers, one for each rank.")
    return shares


def parts_of(samples: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers of samples in the proportion of the shares, by the largest remainder; at least one for each."""
    whole = sum(shares)
    exact = [samples * one / whole for one in shares]
    parts = [max(1, int(one)) for one in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in by_remainder[: max(0, samples - sum(parts))]:
        parts[rank] += 1
    while sum(parts) > samples:  # a rank was given its one sample
        parts[parts.index(max(parts))] -= 1
    return parts


def steps_of(most: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers of steps in the proportion of the shares, the largest of which makes `most`; at least one each."""
    largest = max(shares)
    return [max(1, round(most * one / largest)) for one in shares]


def is_worth(parts: Sequence[int], times: Sequence[float]) -> bool:
    """Whether other parts make all faster by enough."""
    balanced = sum(parts) / sum(part / seconds for part, seconds in zip(parts, times, strict=True))
    return max(times) > (1 + _WORTH) * balanced


def are_known(times: Sequence[float]) -> bool:
    """Whether all ranks have measured theirs."""
    return all(0 < one < math.inf for one in times)
