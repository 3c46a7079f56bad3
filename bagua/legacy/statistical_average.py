"""Averages of a value, such as speed, over the last seconds, and the mean of scores without outliers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence

__all__ = ["StatisticalAverage", "average_by_removing_extreme_values"]

_MAX_RECORDS = 64  # more seconds than any process lives, whatever the clock says
_MAX_TRIMS = 10


class StatisticalAverage:
    """
    Averages over the last 1, 2, 4, ... seconds in constant memory; those in between are interpolated. Owned by one
    thread.

    Args:
        last_update_time: when the last value was recorded, in seconds as `time.time()` gives them; None: now.
        records: records[i] is the average over the 2**i seconds before `last_update_time`.
        record_tail: for how many seconds more there are records, and the average over all of them.

    Attributes:
        last_update_time, records, record_tail: as the arguments, after the last `record`.
    """

    def __init__(
        self,
        last_update_time: float | None = None,
        records: Sequence[float] = (),
        record_tail: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self.last_update_time = time.time() if last_update_time is None else last_update_time
        self.records = list(records)
        self.record_tail = record_tail

    def record_seconds(self) -> float:
        """The span, in seconds, of the longest of `records`."""
        return _span(len(self.records) - 1) if self.records else 0.0

    def total_recording_time(self) -> float:
        """For how many seconds before `last_update_time` there are records."""
        return self.record_seconds() + self.record_tail[0]

    def get_records_mean(self, last_n_seconds: float) -> float:
        """The average over so many seconds before `last_update_time`, at most over all of them; 0 for none."""
        if last_n_seconds <= 0:
            return 0.0
        if not self.records or last_n_seconds >= self.total_recording_time():
            return self._mean_of_all()
        if last_n_seconds <= 1:
            return self.records[0]
        longest = self.record_seconds()
        if last_n_seconds >= longest:
            return _between(
                last_n_seconds, (longest, self.records[-1]), (self.total_recording_time(), self._mean_of_all())
            )
        index = math.frexp(last_n_seconds)[1] - 1  # of the longest span that is not longer, exactly
        shorter, longer = self.records[index : index + 2]
        return _between(last_n_seconds, (_span(index), shorter), (_span(index + 1), longer))

    def record(self, val: float) -> None:
        """`val` was the value from `last_update_time` until now."""
        now = time.time()
        elapsed = max(now - self.last_update_time, 0.0)  # clocks are set back at times
        total = elapsed + self.total_recording_time()
        records: list[float] = []
        while _span(len(records)) <= total and len(records) < _MAX_RECORDS:
            records.append(self._mean_with(val, elapsed, _span(len(records))))
        covered = _span(len(records) - 1) if records else 0.0
        mean_of_all = self._mean_with(val, elapsed, total)
        self.last_update_time, self.records, self.record_tail = now, records, (total - covered, mean_of_all)

    def get(self, last_n_seconds: float) -> float:
        """The average over so many seconds before now; since the last record, the value counts as unchanged."""
        elapsed = time.time() - self.last_update_time
        if last_n_seconds <= elapsed:
            return self.records[0] if self.records else self._mean_of_all()
        return self.get_records_mean(last_n_seconds - elapsed)

    def _mean_of_all(self) -> float:
        seconds, mean = self.record_tail
        return self.records[-1] if self.records and not seconds else mean

    def _mean_with(self, value: float, elapsed: float, seconds: float) -> float:
        """Over the last `seconds`, of which `elapsed` had this value and the others what is on record."""
        if seconds <= elapsed:
            return value
        share = elapsed / seconds
        return value * share + self.get_records_mean(seconds - elapsed) * (1 - share)

    def __str__(self) -> str:
        return str(vars(self))


def average_by_removing_extreme_values(raw_score_list: Iterable[float]) -> tuple[float, float, list[float]]:
    """
    The first third of the scores is left out, as warm-up; then scores that are a standard deviation or more from the
    mean, again and again while they spread more than their mean.

    Returns:
        The mean of the others, their standard deviation, and the others. Of no scores, both numbers are NaN.
    """
    raw = [float(score) for score in raw_score_list]
    scores = _without_outliers(raw[len(raw) // 3 :])
    for _ in range(_MAX_TRIMS):
        if not scores or statistics.pstdev(scores) < statistics.fmean(scores):
            break
        scores = _without_outliers(scores)
    if not scores:
        return math.nan, math.nan, []
    return statistics.fmean(scores), statistics.pstdev(scores), scores


def _without_outliers(scores: list[float]) -> list[float]:
    if not scores:
        return scores
    mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
    return [score for score in scores if abs(score - mean) < deviation] or scores


def _span(index: int) -> float:
    return 2.0**index


def _between(seconds: float, shorter: tuple[float, float], longer: tuple[float, float]) -> float:
    """On the line through two (seconds, mean)."""
    (start, first), (end, second) = shorter, longer
    return first + (second - first) * (seconds - start) / (end - start)
