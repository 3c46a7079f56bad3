"""make perf: verdicts. Nothing is called a change that chance brings about, and what is one is called so."""

from __future__ import annotations

import math
import random

import pytest
from support.perf_tool import TOOLS

from perf.cli import DEFAULT_ROUNDS  # isort: skip (support.perf_tool puts it on the path)
from perf.report import Row, judged, render_closing, render_table  # isort: skip
from perf.rounds import RowSamples  # isort: skip
from perf.verdict import ERROR_CHANCE, FLOOR, MIN_ROUNDS, Verdict, judge, ranks_outside  # isort: skip

assert (TOOLS / "perf").is_dir()


def chance_outside(count: int, outside: int) -> float:
    """That the median of what the values are drawn from lies outside of the spread."""
    return 2 * sum(math.comb(count, k) for k in range(outside + 1)) / 2**count


@pytest.mark.parametrize("count", [*range(MIN_ROUNDS, 60), 200])
def test_the_spread_is_as_narrow_as_the_chance_of_error_allows(count: int) -> None:
    outside = ranks_outside(count)
    assert chance_outside(count, outside) <= ERROR_CHANCE < chance_outside(count, outside + 1)


def test_fewer_rounds_could_not_be_that_sure() -> None:
    assert chance_outside(MIN_ROUNDS - 1, 0) > ERROR_CHANCE
    with pytest.raises(ValueError, match="10 rounds are too few"):
        judge([1.0] * (MIN_ROUNDS - 1))


def test_a_clear_change_is_called() -> None:
    slower = judge([1.10, 1.09, 1.11, 1.12, 1.08] * 4)
    assert (slower.ratio, slower.verdict) == (pytest.approx(1.10), Verdict.MORE)
    assert 1.08 <= slower.low < slower.high <= 1.12
    assert slower.resolution == pytest.approx(1.10 / slower.low - 1)
    assert judge([1 / ratio for ratio in [1.10, 1.09, 1.11, 1.12, 1.08] * 4]).verdict is Verdict.LESS


def test_far_outliers_neither_hide_a_change_nor_make_one() -> None:
    """A neighbour that wakes up doubles the time of some rounds, of either side."""
    assert judge([1.05, 1.06] * 8 + [0.5, 0.6, 2.0, 3.0]).verdict is Verdict.MORE
    assert judge([0.999, 1.001] * 6 + [2.0] * 8).verdict is Verdict.SAME


def test_a_spread_that_straddles_one_is_no_change() -> None:
    judged = judge([0.97, 0.98, 0.99] + [1.10] * 17)
    assert judged.low <= 1 <= judged.high
    assert judged.ratio == pytest.approx(1.10)
    assert judged.verdict is Verdict.SAME


def test_a_steady_change_below_the_floor_is_no_change() -> None:
    assert judge([1 + 0.9 * FLOOR] * 20).verdict is Verdict.SAME
    assert judge([1 + 1.1 * FLOOR] * 20).verdict is Verdict.MORE
    assert judge([1.0] * 20).resolution == FLOOR


def drawn(generator: random.Random, shift: float) -> list[float]:
    """Rounds as they are on a machine that others use: some percent of scatter, and every fourth one far off."""
    ratios = []
    for _ in range(DEFAULT_ROUNDS):
        scatter = generator.gauss(0, 0.02) if generator.random() < 0.75 else generator.gauss(0, 0.5)
        ratios.append(shift * math.exp(scatter))
    return ratios


def test_chance_alone_is_called_a_change_as_rarely_as_promised() -> None:
    generator = random.Random(20261121)
    wrong = sum(judge(drawn(generator, 1.0)).verdict is not Verdict.SAME for _ in range(10_000))
    assert wrong <= 2 * ERROR_CHANCE * 10_000


def test_a_change_of_a_twentieth_is_found_in_spite_of_a_busy_machine() -> None:
    generator = random.Random(20261121)
    found = sum(judge(drawn(generator, 1.05)).verdict is Verdict.MORE for _ in range(1000))
    assert found > 750


def row(channels: int, size: int, time: list[float], cpu: list[float] | None) -> Row:
    samples = RowSamples(time, cpu or [], [0.8, 0.7, 0.9], [100.0, 98.0, 104.0], [110.0, 120.0, 109.0])
    return Row.of(channels, size, samples)


def test_the_table_is_aligned_and_says_what_changed() -> None:
    slow, same, fast = [1.10, 1.09, 1.11] * 7, [0.99, 1.01, 1.00] * 7, [0.90, 0.91, 0.89] * 7
    rows = [
        row(2, 8, same, same),
        row(2, 128 << 20, slow, slow),
        row(8, 1 << 10, fast, None),
        row(8, 4 << 10, same, slow),
    ]
    lines = render_table(rows).splitlines()
    assert [line.split("  ")[-1] for line in lines if line] == [
        "verdict",
        "same",
        "slower, more CPU",
        "faster",
        "same, more CPU",
    ]
    assert lines[3] == "", "the parts stand apart"
    # Every column but the words on the right ends at one place.
    table = [line for line in lines if line]
    ends = {line.index("1.000") + 5 for line in table if " 1.000" in line}
    assert ends == {table[0].index("time ratio") + len("time ratio")}
    assert "128 MiB      100      110       1.100  1.090..1.110" in lines[2]
    assert lines[4].split()[-3:] == ["-", "0.80", "faster"], "no CPU time was counted"
    assert [one.is_worse for one in rows] == [False, True, False, True]

    closing = render_closing(rows)
    assert "slower: 1 of 4 rows: 128 MiB over 2 channels\n" in closing
    assert "more CPU: 2 of 4 rows: 128 MiB over 2 channels, 4 KiB over 8 channels\n" in closing
    assert "faster: 1 of 4 rows: 1 KiB over 8 channels\n" in closing
    assert "less CPU" not in closing
    assert "the median of 21 rounds of fresh processes" in closing
    assert "verdict: all" not in closing
    assert "verdict: all 1 rows are the same" in render_closing(rows[:1])
    assert "in the typical row changes of time above 1.0% are seen (1.0%..1.1%)" in closing
    assert "repeat this where nothing else runs" not in closing
    assert "repeat this where nothing else runs" in render_closing([row(2, 8, [0.7, 1.0, 1.3] * 7, None)])


def test_no_row_with_enough_rounds_gives_no_verdict() -> None:
    assert judged({(2, 8): RowSamples(time_ratios=[1.0] * (MIN_ROUNDS - 1))}) == []
    assert render_closing([]).startswith(f"verdict: none, no size was measured in {MIN_ROUNDS} rounds")
