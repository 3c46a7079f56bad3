"""How work is divided among ranks of different speed, and what their speed is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.engine.data_parallel import own_computing
from bagua.engine.speed_shares import is_worth, parts_of, steps_of
from bagua.engine.step_statistics import PassRecorder
from bagua.tuning.sampled_steps import typical


@given(st.integers(0, 500), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_parts_are_all_samples_by_the_largest_remainder_and_none_is_empty(more: int, shares: list[float]) -> None:
    samples = len(shares) + more
    parts = parts_of(samples, shares)
    assert sum(parts) == samples
    assert min(parts) >= 1
    exact = [samples * one / sum(shares) for one in shares]
    if min(exact) >= 1:
        assert all(abs(part - one) < 1 for part, one in zip(parts, exact, strict=True))


def test_parts_change_where_a_step_becomes_faster_and_not_for_noise() -> None:
    assert parts_of(30, [2, 1]) == [20, 10]
    assert not is_worth([10, 10], [1.0, 1.04])
    assert not is_worth([20, 10], [1.0, 1.04])
    assert is_worth([10, 10], [1.0, 2.0])
    assert not is_worth([20, 10], [1.0, 1.0])


def test_the_latest_steps_are_those_that_are_asked_for() -> None:
    now = 0.0
    recorder = PassRecorder(lambda: now)
    assert recorder.latest(5)[0] == 0
    assert math.isnan(recorder.latest(5)[1])
    # A slow step among others, of which each waits for a fifth.
    for step_s in (9.0, 1.0, 1.0, 50.0, 1.0, 2.0, 2.0, 2.0):
        now += step_s
        recorder.end_pass(step_s / 5, None)
    assert recorder.latest(5) == (5, 2.0, pytest.approx(0.4))
    assert recorder.latest(100) == (7, 2.0, pytest.approx(0.4))


def test_a_step_that_is_slow_once_does_not_count_and_those_of_a_process_with_half_a_core_do() -> None:
    assert math.isnan(typical([]))
    assert typical([1.0] * 30 + [500.0] + [1.0] * 20 + [80.0] + [1.0] * 12) == 1.0
    # The scheduler lets it run for 50 ms of each 100, and a step takes 20.
    assert typical([20.0, 20.0, 70.0, 20.0, 70.0] * 10) == pytest.approx(40.0, rel=0.05)


@pytest.mark.parametrize(("shares", "steps"), [([2, 1], [20, 10]), ([0.1, 30], [1, 20]), ([5, 5, 4.8], [20, 20, 19])])
def test_the_fastest_rank_makes_the_most_steps_and_none_fewer_than_one(shares: list[float], steps: list[int]) -> None:
    assert steps_of(20, shares) == steps


class _Event:
    """Of a GPU that has passed it."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._at_s - self._at_s)


def test_on_a_gpu_what_is_waited_for_is_that_of_the_same_steps() -> None:
    now = 0.0
    recorder = PassRecorder(lambda: now)
    bucket: Any = SimpleNamespace(name="bucket", is_on_gpu=False, flattened_tensor=lambda: torch.empty(1))
    for exposed_s in [5.0] * 100 + [1.0] * 20:  # one in eight is measured
        now += 10.0
        recorder.begin_pass(bucket)
        done: Any = None
        if recorder.is_sampling:
            recorder.launched(bucket)
            begin, end, done = (cast("Any", _Event(at)) for at in (now - 6, now + exposed_s, now))
            recorder.queued(bucket, begin, end)
        recorder.end_pass(None, done)
    assert recorder.latest(20) == (20, 10.0, pytest.approx(1.0))
    assert math.isnan(recorder.latest(3)[2])


def test_what_a_rank_waits_for_between_its_own_steps_is_not_part_of_them() -> None:
    now = 0.0
    recorder = PassRecorder(lambda: now)
    cpu = torch.device("cpu")
    recorder.end_own_step(cpu)  # nothing has begun
    for step_s in (1.0, 1.0, 3.0):
        recorder.begin_own_step(cpu)
        now += step_s
        recorder.end_own_step(cpu)
        now += 100.0
        recorder.end_pass(100.0, None)
    assert recorder.latest(2) == (2, 2.0, 0.0)
    recorder.begin_anew()
    assert recorder.latest(2)[0] == 0


def test_a_module_that_is_not_trained_any_more_is_not_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    first, second = PassRecorder(lambda: now), PassRecorder(lambda: now)
    engines = {name: SimpleNamespace(is_attached=True, recorder=one) for name, one in (("a", first), ("b", second))}
    monkeypatch.setattr("bagua.engine.data_parallel.owners_by_name", engines)
    assert own_computing(20).steps == 0

    def train(*recorders: PassRecorder) -> None:
        nonlocal now
        for recorder in recorders:
            now += 1.0
            recorder.end_pass(0.2, None)

    for _ in range(30):
        train(first)
    for _ in range(10):
        train(first, second)  # in turn: a step is of both
    assert own_computing(8) == (8, pytest.approx(1.6))
    for _ in range(30):
        train(second)
    assert own_computing(20) == (20, pytest.approx(0.8))
