"""Variants in turns, under a clock that the test moves."""

from __future__ import annotations

from bagua.net.bench.errors import BenchError
from bagua.net.bench.turns import Turns, rotated


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
