"""The verdict of paired ratios: what chance brings about is not called a difference, and what is one is called so."""

from __future__ import annotations

import math
import random

import pytest

from bagua.net.bench.verdict import PairedRatio, Verdict, least_repetitions, paired_ratio, ranks_outside, ratio_of

# As `make perf` asks for.
ERROR_CHANCE, FLOOR, ROUNDS = 0.001, 0.01, 30


def judge(ratios: list[float]) -> Verdict:
    return ratio_of(ratios, ERROR_CHANCE).verdict(floor=FLOOR)


def chance_outside(count: int, outside: int) -> float:
    """That the median of what the values are drawn from lies outside of the spread."""
    return 2 * sum(math.comb(count, k) for k in range(outside + 1)) / 2**count


@pytest.mark.parametrize("count", [11, 30, 59, 200])
def test_the_spread_is_as_narrow_as_the_chance_of_error_allows(count: int) -> None:
    outside = ranks_outside(count, ERROR_CHANCE)
    assert chance_outside(count, outside) <= ERROR_CHANCE < chance_outside(count, outside + 1)


@pytest.mark.parametrize("chance", [0.001, 0.01, 0.05])
def test_fewer_repetitions_could_not_be_that_sure(chance: float) -> None:
    least = least_repetitions(chance)
    assert chance_outside(least, 0) <= chance < chance_outside(least - 1, 0)


def test_without_a_chance_the_spread_is_from_the_smallest_to_the_largest() -> None:
    assert paired_ratio([2.0, 6.0, 4.0], [2.0, 2.0, 2.0]) == PairedRatio(2.0, 1.0, 3.0, 3)


def test_a_ratio_is_taken_within_each_repetition() -> None:
    # The machine is three times slower in the last repetition; the ratio does not see it.
    ratio = paired_ratio([1.0, 1.1, 3.3], [1.0, 1.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.1, 1.0, 1.1))
    assert str(ratio) == "no clear difference (spread 1.00..1.10x)"
    assert str(paired_ratio([1.2, 1.1, 1.3], [1.0] * 3)) == "1.20x (spread 1.10..1.30)"
    assert paired_ratio([1.2] * 2, [1.0] * 2).verdict() is Verdict.TOO_FEW
    assert str(paired_ratio([1.2] * 2, [1.0] * 2)) == "too few iterations for a verdict (2 of 3 repetitions)"


def test_a_clear_change_is_called() -> None:
    ratios = [1.10, 1.09, 1.11, 1.12, 1.08] * 4
    slower = ratio_of(ratios, ERROR_CHANCE)
    assert (slower.median, slower.verdict()) == (pytest.approx(1.10), Verdict.MORE)
    assert 1.08 <= slower.low < slower.high <= 1.12
    assert judge([1 / ratio for ratio in ratios]) is Verdict.LESS


def test_far_outliers_neither_hide_a_change_nor_make_one() -> None:
    """A neighbour that wakes up doubles the time of some rounds, of either side."""
    assert judge([1.05, 1.06] * 8 + [0.5, 0.6, 2.0, 3.0]) is Verdict.MORE
    assert judge([0.999, 1.001] * 6 + [2.0] * 8) is Verdict.SAME


def test_a_spread_that_straddles_one_is_no_change() -> None:
    ratio = ratio_of([0.97, 0.98, 0.99] + [1.10] * 17, ERROR_CHANCE)
    assert ratio.low <= 1 <= ratio.high
    assert ratio.median == pytest.approx(1.10)
    assert ratio.verdict() is Verdict.SAME


def test_a_steady_change_below_the_floor_is_no_change() -> None:
    assert judge([1 + 0.9 * FLOOR] * 20) is Verdict.SAME
    assert judge([1 + 1.1 * FLOOR] * 20) is Verdict.MORE


def drawn(generator: random.Random, shift: float) -> list[float]:
    """Rounds as they are on a machine that others use: some percent of scatter, and every fourth one far off."""
    ratios = []
    for _ in range(ROUNDS):
        scatter = generator.gauss(0, 0.02) if generator.random() < 0.75 else generator.gauss(0, 0.5)
        ratios.append(shift * math.exp(scatter))
    return ratios


def test_chance_alone_is_called_a_change_as_rarely_as_promised() -> None:
    generator = random.Random(20261121)
    wrong = sum(judge(drawn(generator, 1.0)) is not Verdict.SAME for _ in range(10_000))
    assert wrong <= 2 * ERROR_CHANCE * 10_000


def test_a_change_of_a_twentieth_is_found_in_spite_of_a_busy_machine() -> None:
    generator = random.Random(20261121)
    found = sum(judge(drawn(generator, 1.05)) is Verdict.MORE for _ in range(1000))
    assert found > 750
