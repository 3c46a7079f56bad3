"""How a global batch is divided among ranks of different speed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.engine.step_statistics import PassRecorder
from bagua.torch_api.contrib.balanced_sampler import is_worth, parts_of


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
