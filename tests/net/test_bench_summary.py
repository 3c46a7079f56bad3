"""From samples to rows and ratios, against figures computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from bagua.net.bench.measurement import Case, Measurement, Sample, busbw_factor
from bagua.net.bench.ring.report import comparisons, paired_series, raw_limit
from bagua.net.bench.turns import Turns

MIB = 1 << 20


def sample(seconds: float, cpu: float = 1.0, iterations: tuple[float, ...] = (), moved: int = 10**9) -> Sample:
    return Sample(len(iterations) or 1, seconds, iterations, cpu, moved)


def turns_of(samples: Mapping[str, Mapping[int, Sequence[Sample]]]) -> Turns[Sample]:
    turns: Turns[Sample] = Turns()
    for name, by_size in samples.items():
        for size, found in by_size.items():
            turns.samples[Case("all_reduce", size), name] = dict(enumerate(found))
    return turns


def test_comparison_speaks_of_128_mib_and_1_kib() -> None:
    def by_size(scale: float, cpu: float) -> dict[int, list[Sample]]:
        return {
            8: [sample(1e-6)] * 2,
            1024: [sample(9.0, iterations=(20e-6 * scale, 20e-6 * scale, 1.0))] * 3,  # one of 1 s does not count
            128 * MIB: [sample(0.1 * scale, cpu), sample(0.2 * scale, cpu), sample(0.2 * scale, cpu)],
            256 * MIB: [sample(1.0)] * 2,
        }

    turns = turns_of({"plugin": by_size(0.8, 1.5), "bare": by_size(1.0, 1.0)})
    (line,) = comparisons(paired_series(turns, ["bare", "absent"]))
    assert line == (
        "plugin vs bare: busbw at 128 MiB 1.25x (spread 1.25..1.25), p50 time at 1 KiB 0.80x (spread 0.80..0.80),"
        " CPU s/GB 1.50x (spread 1.50..1.50)"
    )


def test_pairs_are_of_p50_where_times_are_latency_and_of_means_above() -> None:
    def of(seconds: float, typical: float, cpu: float) -> Sample:
        return sample(seconds, cpu, (typical, typical, typical))

    small, large = 64 << 10, 128 << 10
    turns = turns_of(
        {
            "plugin": {size: [of(6.0, 2.0, 1.5), of(8.0, 3.0, 3.0)] for size in (small, large)},
            "baseline": {size: [of(3.0, 1.0, 1.0), of(2.0, 2.0, 1.0)] for size in (small, large)},
            "idle": {small: [of(1.0, 1.0, 0.0)] * 2},
        }
    )
    found = {(series.baseline, series.bytes): series for series in paired_series(turns, ["baseline", "idle"])}
    assert found["baseline", small].time == [2.0, 1.5]
    assert found["baseline", large].time == [2.0, 4.0]
    assert found["baseline", large].cpu == [1.5, 3.0]
    assert found["idle", small].cpu is None, "a kernel that counted nothing gives no ratio"
    assert ("idle", large) not in found


def raw(gb_s: float, moved: int) -> Sample:
    return sample(moved / (gb_s * 1e9), moved=moved)


def test_the_raw_limit_pools_all_long_transfers_of_a_stream_count() -> None:
    long, short = 256 * MIB, 4 * MIB
    turns = turns_of(
        {
            "raw x1": {MIB: [raw(90, short)] * 9, 64 * MIB: [raw(5, long), raw(5, long), raw(50, long)]},
            "raw x2": {MIB: [raw(1, short)], 32 * MIB: [raw(7, long)], 64 * MIB: [raw(6, long)]},
        }
    )
    limit = raw_limit(turns, links=2)
    assert limit is not None
    assert (limit.gb_s, limit.streams, limit.busbw_gb_s) == (pytest.approx(6.5), 2, pytest.approx(3.25))
    assert raw_limit(turns_of({"plugin": {8: [sample(1)]}}), links=2) is None


@pytest.mark.parametrize(
    ("collective", "ranks", "expected"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("send_recv", 8, 1.0),
        ("one_way", 2, 1.0),
    ],
)
def test_busbw_factors_are_those_of_nccl_tests(collective: str, ranks: int, expected: float) -> None:
    assert busbw_factor(collective, ranks) == pytest.approx(expected)


def test_a_row_has_median_range_and_percentiles() -> None:
    singles = tuple(index * 1e-6 for index in range(1, 101))
    samples = [sample(seconds, iterations=singles) for seconds in (2e-6, 1e-6, 4e-6)]
    row = Measurement("plugin", "all_reduce", 1000, 4, samples)
    assert (row.time_us, row.time_min_us, row.time_max_us) == pytest.approx((2.0, 1.0, 4.0))
    assert (row.algbw_gb_s, row.busbw_gb_s) == pytest.approx((0.5, 0.75))  # 1000 B / 2 us
    assert row.busbw_range_gb_s == pytest.approx((0.375, 1.5))
    assert (row.latency_us(50), row.latency_us(99)) == pytest.approx((50, 99))
    assert Measurement("plugin", "all_reduce", 65537, 4, samples).latency_us(50) is None
    with pytest.raises(ValueError, match="must be positive"):
        Measurement("plugin", "all_reduce", 8, 2, [sample(0.0)])
