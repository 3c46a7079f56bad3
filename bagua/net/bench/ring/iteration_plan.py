"""How many iterations of each size fit into the time budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_ITERATIONS = 1000
MIN_REPEATS = 1


@dataclass(frozen=True)
class SizePlan:
    iterations: int
    warmup: int


@dataclass(frozen=True)
class IterationPlan:
    repeats: int
    sizes: Mapping[int, SizePlan]
    expected_s: float


def expected_seconds(costs: Mapping[int, float], repeats: int, sizes: Mapping[int, SizePlan]) -> float:
    return repeats * sum(cost * (sizes[size].iterations + sizes[size].warmup) for size, cost in costs.items())


def fixed_plan(costs: Mapping[int, float], iterations: int, warmup: int, repeats: int) -> IterationPlan:
    """-n and -w as given."""
    sizes = dict.fromkeys(costs, SizePlan(iterations, warmup))
    return IterationPlan(repeats, sizes, expected_seconds(costs, repeats, sizes))


def budget_plan(
    costs: Mapping[int, float], budget_s: float, repeats: int, *, may_reduce_repeats: bool, warmup: int | None = None
) -> IterationPlan:
    """costs: seconds of one iteration of every backend together, by size.

    Each size gets an equal slice of a repetition; what a size cannot spend (MAX_ITERATIONS) or what a large one
    overdraws (at least one iteration and its warm-up) is shared by the others. Where not even single iterations fit,
    repetitions are given up, down to MIN_REPEATS; the run then stops at its deadline.
    """
    smallest = sum(costs.values()) * (1 + (1 if warmup is None else warmup))
    if may_reduce_repeats and smallest * repeats > budget_s:
        repeats = min(repeats, max(MIN_REPEATS, int(budget_s / smallest)))
    sizes: dict[int, SizePlan] = {}
    remaining = budget_s / repeats
    # The dearest first, so that its overdraft is known before the rest is shared; ends with the cheapest, which
    # reach MAX_ITERATIONS long before their slice.
    dearest_first = sorted(costs.items(), key=lambda item: -item[1])
    for index, (size, cost) in enumerate(dearest_first):
        affordable = int(max(remaining, 0.0) / (len(costs) - index) / cost)
        planned = _split(affordable, warmup)
        sizes[size] = planned
        remaining -= cost * (planned.iterations + planned.warmup)
    return IterationPlan(repeats, sizes, expected_seconds(costs, repeats, sizes))


def _split(affordable: int, warmup: int | None) -> SizePlan:
    """A sixth of the iterations warm up (1 to 20), unless the user said how many."""
    if warmup is None:
        warmup = min(20, max(1, affordable // 6))
    return SizePlan(min(MAX_ITERATIONS, max(1, affordable - warmup)), warmup)
