"""How long turns are and what all of them take."""

from __future__ import annotations

import pytest

from bagua.net.bench.nccl_ab.duration import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    MIN_TURN_S,
    SHARE_OF_LIMIT,
    Calibration,
    TurnPlan,
    fitting_plan,
    fixed_plan,
    iterations_for,
    warmup_for,
)
from bagua.net.bench.nccl_ab.plan import Case

SMALL, LARGE = Case("all_reduce", 1024), Case("all_reduce", 1 << 30)
COSTS = {SMALL: [Calibration(1e-4, 0.01), Calibration(2e-4, 0.01)], LARGE: [Calibration(0.1), Calibration(0.2)]}


def test_iterations_fill_a_turn_within_limits() -> None:
    assert iterations_for(1e-3, 0.1) == 100
    assert iterations_for(1e-9, 0.1) == MAX_ITERATIONS
    assert iterations_for(10.0, 0.1) == MIN_ITERATIONS
    assert iterations_for(10.0, 0.1, least=1) == 1
    with pytest.raises(ValueError, match="must be positive"):
        iterations_for(0.0, 0.1)


def test_there_is_always_a_warmup() -> None:
    assert [warmup_for(count) for count in (1, 3, 100, 1000)] == [1, 1, 10, 20]


def test_without_a_tight_limit_turns_are_as_long_as_asked_for() -> None:
    plan = fitting_plan(COSTS, 5, 0.1, None, 1000.0)
    # The slowest backend's 0.2 ms: 500 iterations in 0.1 s, timed one by one 200 times.
    assert plan.turns == {SMALL: TurnPlan(500, 20, 200), LARGE: TurnPlan(MIN_ITERATIONS, 1, 0)}
    assert plan.fits
    assert plan.expected_s == pytest.approx(5 * (720 * 3e-4 + 0.02 + 4 * 0.3))


def test_given_warmups_stay() -> None:
    assert {turn.warmup for turn in fitting_plan(COSTS, 5, 0.1, 7, 1000.0).turns.values()} == {7}


@pytest.mark.parametrize("left_s", [7.5, 6.0, 4.5])
def test_a_tighter_limit_has_shorter_turns_and_then_fewer_iterations_of_large_sizes(left_s: float) -> None:
    plan = fitting_plan(COSTS, 5, 0.1, None, left_s)
    assert plan.fits
    assert plan.expected_s <= SHARE_OF_LIMIT * left_s
    assert 1 <= plan.turns[LARGE].iterations <= MIN_ITERATIONS
    asked = fitting_plan(COSTS, 5, 0.1, None, 1000.0)
    assert plan.expected_s < asked.expected_s
    assert all(plan.turns[case].iterations <= asked.turns[case].iterations for case in COSTS)


def test_where_nothing_fits_the_shortest_turns_are_planned_and_it_says_so() -> None:
    plan = fitting_plan(COSTS, 5, 0.1, None, 1.0)
    assert not plan.fits
    assert plan.turns[LARGE] == TurnPlan(1, 1, 0)
    assert plan.turns[SMALL].iterations == round(MIN_TURN_S / 2e-4)


def test_given_iterations_are_never_changed() -> None:
    plan = fixed_plan(COSTS, 3, 50, None, 10.0)
    assert {turn.iterations for turn in plan.turns.values()} == {50}
    assert not plan.fits
    assert fixed_plan(COSTS, 3, 50, None, 100.0).fits
