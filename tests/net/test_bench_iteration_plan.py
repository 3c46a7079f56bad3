"""The time budget becomes iterations: never above it where single iterations fit, and fairly shared."""

from __future__ import annotations

import pytest

from bagua.net.bench.ring.iteration_plan import MAX_ITERATIONS, MIN_REPEATS, SizePlan, budget_plan, fixed_plan

# 8 B to 256 MiB on loopback, four backends: 20 us + bytes / 5 GB/s each.
LOOPBACK = {8 << shift: 4 * (20e-6 + (8 << shift) / 5e9) for shift in range(26)}


@pytest.mark.parametrize("budget_s", [20.0, 140.0, 600.0])
def test_a_budget_is_kept_and_used(budget_s: float) -> None:
    plan = budget_plan(LOOPBACK, budget_s, 7, may_reduce_repeats=True)
    assert plan.repeats == 7
    assert plan.expected_s <= budget_s
    assert all(size.iterations >= 1 and size.warmup >= 1 for size in plan.sizes.values())
    assert plan.sizes[256 << 20].iterations <= plan.sizes[1 << 20].iterations <= plan.sizes[8].iterations
    assert plan.sizes[8].iterations == MAX_ITERATIONS


def test_equal_sizes_share_equally() -> None:
    plan = budget_plan({1: 0.01, 2: 0.01, 4: 0.01}, 9.0, 3, may_reduce_repeats=False)
    assert len(set(plan.sizes.values())) == 1
    assert plan.sizes[1] == SizePlan(84, 16)  # 100 in a second, a sixth of them to warm up
    assert plan.expected_s == pytest.approx(9.0)


def test_what_a_dear_size_overdraws_the_cheap_ones_give() -> None:
    plan = budget_plan({1: 0.001, 2: 2.0}, 15.0, 3, may_reduce_repeats=False)
    assert plan.sizes[2] == SizePlan(1, 1)
    assert plan.expected_s <= 15.0


def test_too_small_a_budget_gives_up_repetitions_and_then_the_budget() -> None:
    plan = budget_plan({1: 1.0}, 10.0, 7, may_reduce_repeats=True)
    assert plan.repeats == 5
    plan = budget_plan({1: 1.0}, 1.0, 7, may_reduce_repeats=True)
    assert plan.repeats == MIN_REPEATS == 1
    assert plan.sizes[1] == SizePlan(1, 1)
    assert plan.expected_s == pytest.approx(2.0)


def test_repetitions_that_the_user_asked_for_stay() -> None:
    assert budget_plan({1: 1.0}, 1.0, 7, may_reduce_repeats=False).repeats == 7


def test_the_users_warmup_stays() -> None:
    plan = budget_plan({1: 0.01}, 3.0, 3, may_reduce_repeats=True, warmup=0)
    assert plan.sizes[1] == SizePlan(100, 0)


def test_fixed_iterations() -> None:
    plan = fixed_plan({1: 0.5, 2: 1.0}, iterations=20, warmup=5, repeats=2)
    assert set(plan.sizes.values()) == {SizePlan(20, 5)}
    assert plan.expected_s == pytest.approx(75.0)
