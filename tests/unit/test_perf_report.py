"""make perf: its table, and what it adds up to. The verdict itself is tested in tests/net/test_bench_verdict.py."""

from __future__ import annotations

from support.perf_tool import TOOLS

from perf.report import MIN_ROUNDS, Row, judged, render_closing, render_table  # isort: skip
from perf.rounds import RowSamples  # isort: skip (support.perf_tool puts it on the path)

assert (TOOLS / "perf").is_dir()


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
    assert [line.split("  ")[-1] for line in lines if line and "ratio" not in line] == [
        "verdict",
        "same",
        "slower, more CPU",
        "faster",
        "same, more CPU",
    ]
    assert lines[4] == "", "the parts stand apart"
    assert "128 MiB   100   110  1.100  1.090..1.110" in lines[3]
    assert lines[5].split()[-3:] == ["-", "0.80", "faster"], "no CPU time was counted"
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
