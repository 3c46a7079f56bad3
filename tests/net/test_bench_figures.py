"""The figures of every comparison: busbw as nccl-tests defines it, variants that take turns, verdicts that chance does
not bring about, and the files and progress lines that tell of them."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path

import pytest

from bagua.net.bench.errors import BenchError
from bagua.net.bench.measurement import Measurement, Sample, busbw_factor
from bagua.net.bench.result_file import Figure, ResultFile, read_result, write_result
from bagua.net.bench.table import LOUD, RESET, render_table
from bagua.net.bench.turns import Turns
from bagua.net.bench.verdict import Verdict, paired_ratio, ratio_of
from bagua.progress import Progress

# As `make perf` asks for.
ERROR_CHANCE, FLOOR, ROUNDS = 0.001, 0.01, 30


def test_busbw_and_percentiles() -> None:
    factors = [busbw_factor("all_reduce", ranks) for ranks in (2, 4)]
    assert factors == [1.0, 1.5]
    others = {"all_gather": 0.875, "reduce_scatter": 0.875, "all_to_all": 0.875}
    others |= {"broadcast": 1.0, "send_recv": 1.0, "one_way": 1.0}
    assert {name: busbw_factor(name, 8) for name in others} == others
    singles = tuple(index * 1e-6 for index in range(1, 101))
    samples = [Sample(100, seconds, of, 1.0, 10**9) for seconds, of in ((2e-6, singles), (1e-6, ()), (4e-6, ()))]
    row = Measurement("plugin", "all_reduce", 1000, 4, samples)
    assert (row.time_us, row.time_min_us, row.time_max_us) == pytest.approx((2.0, 1.0, 4.0))
    assert (row.algbw_gb_s, row.busbw_gb_s) == pytest.approx((0.5, 0.75))  # 1000 B / 2 us
    assert row.busbw_range_gb_s == pytest.approx((0.375, 1.5))
    assert (row.latency_us(50), row.latency_us(99)) == pytest.approx((50, 99))
    assert Measurement("plugin", "all_reduce", 65537, 4, samples).latency_us(50) is None


class Played:
    """A measure that takes a second at once and fails where a test says."""

    def __init__(self, fails: tuple[str, str, int] | None = None) -> None:
        self.now = 0.0
        self.journal: list[str] = []
        self._fails = fails

    def __call__(self, case: str, variant: str, number: int) -> float:
        self.journal.append(f"{case}{variant}{number}")
        self.now += 1.0
        if self._fails == (case, variant, number):
            raise BenchError("rank 1 failed")
        return self.now

    def clock(self) -> float:
        return self.now


PLAN = {"x": ["a", "b", "c"], "y": ["a", "b", "c"]}


def test_variants_take_turns_and_one_that_fails_is_left_out_of_that_case() -> None:
    played, turns = Played(fails=("y", "b", 1)), Turns[float]()
    turns.take(PLAN, 3, played, clock=played.clock)
    assert played.journal[:9] == ["xa0", "xb0", "xc0", "xb1", "xc1", "xa1", "xc2", "xa2", "xb2"]
    assert turns.errors == ["b with y: rank 1 failed"]
    assert [len(turns.of(case, name)) for case in PLAN for name in "abc"] == [3, 3, 3, 3, 1, 3]
    assert len(turns.pairs("y", "a", "b")) == 1, "of the round that both have"


def test_cases_share_the_time_and_no_round_is_cut_short() -> None:
    played, turns = Played(), Turns[float]()
    turns.take(PLAN, 100, played, time_limit_s=16.0, clock=played.clock)
    assert [len(turns.of(case, name)) for case in PLAN for name in "abc"] == [2, 2, 2, 3, 3, 3]
    assert turns.notes[0] == "x: 2 of 100 rounds ran: another takes 3 s, and 2 s are left of --time-limit 16"
    late = Turns[float]()
    late.take({**PLAN, "z": ["a"]}, 1, played, time_limit_s=2.0, clock=played.clock)
    (error,) = late.errors
    assert error.startswith("--time-limit 2 s was over before y, z; allow more time")


def judge(ratios: list[float]) -> Verdict:
    return ratio_of(ratios, ERROR_CHANCE).verdict(floor=FLOOR)


def test_verdicts() -> None:
    # The machine is three times slower in the last repetition; the ratio does not see it.
    assert str(paired_ratio([1.0, 1.1, 3.3], [1.0, 1.0, 3.0])) == "no clear difference (spread 1.00..1.10x)"
    assert str(paired_ratio([1.2, 1.1, 1.3], [1.0] * 3)) == "1.20x (spread 1.10..1.30)"
    assert str(paired_ratio([1.2] * 2, [1.0] * 2)) == "too few iterations for a verdict (2 of 3 repetitions)"
    assert judge([1.10, 1.09, 1.11, 1.12, 1.08] * 4) is Verdict.MORE
    assert judge([0.91, 0.92, 0.90, 0.89, 0.93] * 4) is Verdict.LESS
    # A neighbour that wakes up doubles the time of some rounds, of either side.
    assert judge([1.05, 1.06] * 8 + [0.5, 0.6, 2.0, 3.0]) is Verdict.MORE
    assert judge([0.999, 1.001] * 6 + [2.0] * 8) is Verdict.SAME
    assert judge([0.97, 0.98, 0.99] + [1.10] * 17) is Verdict.SAME, "the spread straddles 1"
    assert judge([1 + 0.9 * FLOOR] * 20) is Verdict.SAME
    assert judge([1 + 1.1 * FLOOR] * 20) is Verdict.MORE


def test_chance_is_no_change_and_a_change_of_a_twentieth_is_found() -> None:
    """Rounds as they are on a machine that others use: some percent of scatter, and every fourth one far off."""
    generator = random.Random(20261121)

    def drawn(shift: float) -> list[float]:
        scatters = [generator.gauss(0, 0.02 if generator.random() < 0.75 else 0.5) for _ in range(ROUNDS)]
        return [shift * math.exp(scatter) for scatter in scatters]

    wrong = sum(judge(drawn(1.0)) is not Verdict.SAME for _ in range(10_000))
    assert wrong <= 2 * ERROR_CHANCE * 10_000
    assert sum(judge(drawn(1.05)) is Verdict.MORE for _ in range(1000)) > 750


def test_wrong_data_is_loud_on_a_terminal() -> None:
    samples = [Sample(7, 1e-3, (), 1.0, 10**9)]
    rows = [Measurement(name, "all_reduce", 8, 2, samples, verified=name != "a") for name in "ab"]
    lines = render_table(rows, colour=True).splitlines()
    assert [line.startswith(LOUD) and line.endswith(RESET) for line in lines[2:]] == [True, False]
    assert "\x1b" not in render_table(rows)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_is_redrawn_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal, file = _Terminal(), io.StringIO()
    with Progress(4, stream=terminal) as progress:
        progress.advance("x" * 200)
        assert len(terminal.getvalue().removeprefix("\r\x1b[2K")) == 39, "it never wraps"
        progress.message("that stays")
    assert terminal.getvalue().endswith("\r\x1b[2Kthat stays\n\r\x1b[2K")
    progress = Progress(100, stream=file)
    for step in range(30):
        progress.advance(f"step {step}")
    assert file.getvalue() == "  1% step 0, 0 s\n", "now and then"


def test_a_result_file_is_read_as_it_was_written_and_others_are_refused_by_name(tmp_path: Path) -> None:
    time = Figure({"backend": "plugin", "size_bytes": 8}, "time", "us", 14.5, 14.2, 30.1, 7)
    about = {"command": "bagua-net-bench -b 8", "date": "2026-11-23T12:00:00+00:00", "commit": None}
    facts = {"machine": {"cpus_usable": 2}, "versions": {"bagua": "1.0.0"}, "parameters": {"channels": 2}}
    for figures in ((time, Figure({"size_bytes": 16}, "time", "us", 15.0, repetitions=None)), ()):
        result = ResultFile(title="All-reduce", figures=figures, notes=("Busy.",), **about, **facts)  # type: ignore[arg-type]
        write_result(tmp_path / "result.json", result)
        assert read_result(tmp_path / "result.json") == result
    for text in ("", "[]", "{}", '{"schema": 2}', '{"schema": 1, "measurements": []}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match=r"other\.json"):
            read_result(tmp_path / "other.json")
