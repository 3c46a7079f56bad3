"""algbw, busbw and percentiles against figures computed by hand."""

from __future__ import annotations

import pytest

from bagua.net.bench.measurement import COLLECTIVES, Measurement, busbw_factor, percentile


def make(**changes: object) -> Measurement:
    arguments: dict[str, object] = {
        "backend": "plugin",
        "collective": "all_reduce",
        "size_bytes": 1000,
        "ranks": 4,
        "iterations": 10,
        "repetition_seconds": [2e-6, 1e-6, 4e-6],
    }
    return Measurement.from_samples(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "ranks", "expected"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 1, 0.0),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send_recv", 8, 1.0),
        ("one_way", 2, 1.0),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(collective: str, ranks: int, expected: float) -> None:
    assert busbw_factor(collective, ranks) == pytest.approx(expected)


def test_every_collective_has_a_factor() -> None:
    assert all(busbw_factor(collective, 3) > 0 for collective in COLLECTIVES)


def test_unknown_collectives_and_empty_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'allreduce'; known: all_reduce"):
        busbw_factor("allreduce", 2)
    with pytest.raises(ValueError, match="0 ranks"):
        busbw_factor("all_reduce", 0)


def test_time_is_the_median_and_the_range_of_repetitions() -> None:
    row = make()
    assert (row.time_us, row.time_min_us, row.time_max_us) == pytest.approx((2.0, 1.0, 4.0))
    assert row.algbw_gb_s == pytest.approx(0.5)  # 1000 B / 2 us
    assert row.busbw_gb_s == pytest.approx(0.75)
    assert row.busbw_range_gb_s == pytest.approx((0.375, 1.5))
    assert row.verified is None


def test_latency_only_of_small_sizes_that_were_timed_one_by_one() -> None:
    seconds = [index * 1e-6 for index in range(1, 101)]
    small = make(size_bytes=65536, iteration_seconds=seconds)
    assert small.latency_p50_us == pytest.approx(50)
    assert small.latency_p99_us == pytest.approx(99)
    assert make(size_bytes=65537, iteration_seconds=seconds).latency_p50_us is None
    assert make(size_bytes=8).latency_p99_us is None


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [([7.0], 50, 7), ([1, 2], 50, 1), ([3, 1, 2], 50, 2), ([1, 2, 3, 4], 75, 3), ([1, 2], 99, 2), ([1, 2], 0.1, 1)],
)
def test_percentile_is_a_measured_value(samples: list[float], percent: float, expected: float) -> None:
    assert percentile(samples, percent) == expected


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="plugin at 1000 B has no samples"):
        make(repetition_seconds=[])
    with pytest.raises(ValueError, match="must be positive"):
        make(repetition_seconds=[1e-6, 0.0])
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)
    with pytest.raises(ValueError, match="outside"):
        percentile([1.0], 0)
