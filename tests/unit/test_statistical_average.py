"""Averages over the last seconds, with a clock that the test sets, and the mean of scores without outliers."""

from __future__ import annotations

import math

import pytest

from bagua.legacy import statistical_average
from bagua.torch_api.utils import StatisticalAverage, average_by_removing_extreme_values


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(statistical_average.time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_record_is_averaged_with_what_was_recorded_before(clock: Clock) -> None:
    before = [5.0, 4.5, 3.5]
    average = StatisticalAverage(clock.now, before, (2.0, 2.5))
    assert (average.record_seconds(), average.total_recording_time()) == (4.0, 6.0)
    clock.now += 1
    average.record(6.0)
    assert average.last_update_time == clock.now
    assert average.total_recording_time() == pytest.approx(7)
    # Of the last n seconds, one has the new value, and n - 1 have the mean of n - 1 seconds before.
    for seconds, expected in [(1, 6), (2, (6 + 5) / 2), (4, (6 + 4 * 3) / 4), (7, (6 + 2.5 * 6) / 7)]:
        assert average.get_records_mean(seconds) == pytest.approx(expected), seconds
    # Between those that are kept, linear.
    assert average.get_records_mean(3) == pytest.approx((5.5 + 4.5) / 2)
    assert average.get_records_mean(5.5) == pytest.approx((4.5 + 3.0) / 2)
    assert average.get_records_mean(100) == pytest.approx(3.0)
    assert average.get_records_mean(0.5) == 6
    assert average.get_records_mean(0) == 0
    assert before == [5.0, 4.5, 3.5]
    assert "record_tail" in str(average)
    assert str(clock.now) in str(average)


def test_spans_within_the_last_record_have_its_value(clock: Clock) -> None:
    average = StatisticalAverage(clock.now)
    clock.now += 5
    average.record(3.0)
    assert average.records == [3.0, 3.0, 3.0]
    assert average.record_tail == (1.0, 3.0)
    clock.now += 2
    # Since then nothing is known, so that the latest value stands for it.
    assert average.get(2) == 3
    assert average.get(4) == 3


def test_time_adds_up_and_a_constant_stays_constant(clock: Clock) -> None:
    for steps in ([0.25] * 10, [0.0, 0.3, 7.0, 0.0, 100.5], [3.0]):
        average = StatisticalAverage()
        assert average.total_recording_time() == average.get(1) == 0
        for step in steps:
            clock.now += step
            average.record(7.0)
        total = math.fsum(steps)
        assert average.total_recording_time() == pytest.approx(total)
        assert average.record_seconds() <= total
        for seconds in (0.1, 1, 1.5, 2, total / 2, total, 2 * total):
            assert average.get(seconds) == pytest.approx(7), seconds


def test_extreme_values_are_left_out() -> None:
    for scores, kept in (
        ([900.0, 900.0, 10.0, 11.0, 9.0, 10.0], [10.0, 10.0]),  # the first third is left out as warm-up
        ([1.0, 3.0], [1.0, 3.0]),
        ([0.0, 0.0, 10.0, 11.0, 9.0, 500.0], [10.0, 11.0, 9.0]),
        ([5.0], [5.0]),
    ):
        mean, deviation, left = average_by_removing_extreme_values(scores)
        assert left == kept
        assert mean == pytest.approx(sum(left) / len(left))
        assert deviation == pytest.approx(math.sqrt(sum((one - mean) ** 2 for one in left) / len(left)))
    mean, deviation, left = average_by_removing_extreme_values([])
    assert (math.isnan(mean), math.isnan(deviation), left) == (True, True, [])
