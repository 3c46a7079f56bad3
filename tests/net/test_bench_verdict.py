"""What a measurement is made of: sizes as nccl-tests spells them, variants in turns, under a clock that the test moves,
and the verdict of paired ratios: what chance brings about is not called a difference, and what is one is called so."""

from __future__ import annotations

import math
import random

import pytest

from bagua.net.bench.errors import BenchError
from bagua.net.bench.sizes import MAX_SIZE_BYTES, format_size, parse_size, size_series
from bagua.net.bench.turns import Turns, rotated
from bagua.net.bench.verdict import PairedRatio, Verdict, least_repetitions, paired_ratio, ranks_outside, ratio_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("8", 8),
        ("8B", 8),
        ("1K", 1024),
        ("1k", 1024),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        ("256M", 256 << 20),
        ("256MiB", 256 << 20),
        ("1.5M", 3 << 19),
        ("0.5K", 512),
        (" 2G ", 2 << 30),
        ("1024G", MAX_SIZE_BYTES),
    ],
)
def test_parse_size(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "write for example") for text in ("", "M", "-1", "1e6", "1T", "1KB2", "1 2", "1,5M")),
        ("0.3K", "whole number of bytes"),
        ("1025G", f"limit is {MAX_SIZE_BYTES} bytes"),
    ],
)
def test_a_wrong_size_names_the_text_and_the_remedy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        parse_size(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(8, "8 B"), (1536, "1.5 KiB"), (256 << 20, "256 MiB"), (1 << 40, "1024 GiB")],
)
def test_a_formatted_size_parses_back(size: int, expected: str) -> None:
    assert format_size(size) == expected
    assert parse_size(expected) == size


def test_series_includes_the_end_when_it_is_reached() -> None:
    assert size_series(8, 64, 2) == [8, 16, 32, 64]
    assert size_series(8, 63, 2) == [8, 16, 32]
    assert size_series(5, 5, 4) == [5]


@pytest.mark.parametrize(
    ("begin", "end", "factor", "message"),
    [
        (0, 8, 2, "below the limit of 1 B; raise -b"),
        (1024, 8, 2, "1 KiB is above the largest size 8 B; lower -b"),
        (8, 1024, 1, r"factor 1 is outside 2\.\.1024"),
    ],
)
def test_a_wrong_series_names_value_and_option(begin: int, end: int, factor: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        size_series(begin, end, factor)


class Played:
    """A measure that takes its seconds at once and fails where a test says."""

    def __init__(self, seconds: dict[str, float] | float = 1.0, fails: tuple[str, str, int] | None = None) -> None:
        self.now = 0.0
        self.journal: list[str] = []
        self._seconds, self._fails = seconds, fails

    def __call__(self, case: str, variant: str, number: int) -> float:
        self.journal.append(f"{case}{variant}{number}")
        self.now += self._seconds if isinstance(self._seconds, float) else self._seconds[case]
        if self._fails == (case, variant, number):
            raise BenchError("rank 1 failed")
        return self.now

    def clock(self) -> float:
        return self.now


PLAN = {"x": ["a", "b", "c"], "y": ["a", "b", "c"]}


def test_each_round_begins_with_another_variant() -> None:
    played, turns = Played(), Turns[float]()
    turns.take({"x": ["a", "b", "c"]}, 3, played, clock=played.clock)
    assert played.journal == ["xa0", "xb0", "xc0", "xb1", "xc1", "xa1", "xc2", "xa2", "xb2"]
    assert (turns.errors, turns.notes) == ([], [])
    assert turns.of("x", "a") == [1, 6, 8]
    assert rotated([], 3) == []


def test_a_variant_that_fails_is_left_out_of_that_case() -> None:
    played, turns = Played(fails=("x", "b", 1)), Turns[float]()
    turns.take(PLAN, 3, played, clock=played.clock)
    assert turns.errors == ["b with x: rank 1 failed"]
    assert turns.failed == {("x", "b")}
    assert [len(turns.of(case, name)) for case in PLAN for name in "abc"] == [3, 1, 3, 3, 3, 3]
    assert len(turns.pairs("x", "a", "b")) == 1, "of the round that both have"


def test_cases_share_the_time_and_no_round_is_cut_short() -> None:
    played, turns = Played(), Turns[float]()
    turns.take(PLAN, 100, played, time_limit_s=16.0, clock=played.clock)
    assert [len(turns.of(case, name)) for case in PLAN for name in "abc"] == [2, 2, 2, 3, 3, 3]
    assert turns.notes[0] == "x: 2 of 100 rounds ran: another takes 3 s, and 2 s are left of --time-limit 16"


def test_what_was_never_measured_is_an_error() -> None:
    played, turns = Played(10.0), Turns[float]()
    turns.take(PLAN, 2, played, time_limit_s=30.0, clock=played.clock)
    assert [len(turns.of(case, "a")) for case in PLAN] == [1, 0]
    (error,) = turns.errors
    assert error.startswith("--time-limit 30 s was over before y; allow more time")


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
