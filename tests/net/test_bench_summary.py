"""From samples to rows and ratios, against figures computed by hand."""

from __future__ import annotations

import pytest

from bagua.net.bench.ring.interleaved_run import RunResults
from bagua.net.bench.ring.sessions import Sample, Verification, default_raw_streams
from bagua.net.bench.ring.summary import best_raw_only, compare, comparisons, measurements, raw_limit

MIB = 1 << 20


def sample(seconds: float, cpu: float = 1.0, moved: int = 10**9, iterations: tuple[float, ...] = ()) -> Sample:
    return Sample(len(iterations) or 1, seconds, iterations, cpu, moved)


def test_comparison_speaks_of_128_mib_and_1_kib() -> None:
    def by_size(scale: float, cpu: float) -> dict[int, list[Sample]]:
        return {
            8: [sample(1e-6)] * 2,
            1024: [sample(9.0, iterations=(20e-6 * scale, 20e-6 * scale, 1.0))] * 3,
            128 * MIB: [sample(0.1 * scale, cpu), sample(0.2 * scale, cpu), sample(0.2 * scale, cpu)],
            256 * MIB: [sample(1.0)] * 2,
        }

    results = RunResults({"plugin": by_size(0.8, 1.5), "bare": by_size(1.0, 1.0)})
    found = compare(results, "plugin", "bare")
    assert found is not None
    assert found.busbw.median == pytest.approx(1.25)
    assert found.time.median == pytest.approx(0.8)  # of the p50, in spite of the outlier of 1 s
    assert found.cpu is not None
    assert found.cpu.median == pytest.approx(1.5)
    assert str(found) == (
        "plugin vs bare: busbw at 128 MiB 1.25x (spread 1.25..1.25), p50 time at 1 KiB 0.80x (spread 0.80..0.80),"
        " CPU s/GB 1.50x (spread 1.50..1.50)"
    )


def test_comparison_takes_the_ends_of_other_series() -> None:
    results = RunResults({"plugin": {8: [sample(1)], 64: [sample(2)]}, "bare": {8: [sample(1)], 64: [sample(2)]}})
    found = compare(results, "plugin", "bare")
    assert found is not None
    assert (found.small_bytes, found.large_bytes) == (8, 64)


def test_only_what_ran_is_compared() -> None:
    results = RunResults({"plugin": {8: [sample(1)]}, "bare": {16: [sample(1)]}})
    assert compare(results, "plugin", "bare") is None
    assert comparisons(results, ["bare", "gloo"]) == []


def test_cpu_that_the_kernel_did_not_count_is_left_out() -> None:
    results = RunResults({"plugin": {8: [sample(1, cpu=0)]}, "bare": {8: [sample(1, cpu=1)]}})
    found = compare(results, "plugin", "bare")
    assert found is not None
    assert found.cpu is None
    assert "CPU" not in str(found)


def make_run() -> RunResults:
    return RunResults(
        {
            "plugin": {64: [sample(1e-6)], 4 * MIB: [sample(4 * MIB / 4e9), sample(4 * MIB / 2e9), sample(1.0)]},
            "raw x1": {4 * MIB: [sample(4 * MIB / 5e9, moved=4 * MIB)]},
            "raw x4": {4 * MIB: [sample(4 * MIB / 8e9, moved=4 * MIB)]},
        },
        {("plugin", 64): Verification(True, ""), ("plugin", 4 * MIB): Verification(False, "rank 1: 3 wrong")},
    )


def raw_sample(gb_s: float, moved: int) -> Sample:
    return Sample(
        iterations=4, seconds=moved / 4 / (gb_s * 1e9), iteration_seconds=(), cpu_seconds=1, moved_bytes=moved
    )


def test_the_raw_limit_pools_all_long_transfers_of_a_stream_count() -> None:
    long, short = 256 * MIB, 4 * MIB
    lucky_once = [raw_sample(5, long), raw_sample(5, long), raw_sample(50, long)]
    results = RunResults(
        {
            "raw x1": {MIB: [raw_sample(90, short)] * 9, 64 * MIB: lucky_once},
            "raw x2": {MIB: [raw_sample(1, short)], 32 * MIB: [raw_sample(7, long)], 64 * MIB: [raw_sample(6, long)]},
        }
    )
    limit = raw_limit(results, links=1)
    assert limit is not None
    assert (limit.gb_s, limit.streams) == (pytest.approx(6.5), 2)


def test_the_raw_limit_is_the_best_median() -> None:
    limit = raw_limit(make_run(), links=2)
    assert limit is not None
    assert limit.gb_s == pytest.approx(8.0)
    assert limit.streams == 4
    assert limit.busbw_gb_s == pytest.approx(4.0)
    assert raw_limit(RunResults({"plugin": {8: [sample(1)]}}), links=2) is None


def test_rows_carry_share_verification_and_notes() -> None:
    results = make_run()
    limit = raw_limit(results, links=2)
    collectives = {"plugin": "all_reduce", "raw x1": "one_way", "raw x4": "one_way"}
    rows = measurements(results, collectives, 2, limit)
    assert [(row.backend, row.bytes) for row in rows] == [
        ("plugin", 64),
        ("plugin", 4 * MIB),
        ("raw x1", 4 * MIB),
        ("raw x4", 4 * MIB),
    ]
    small, large, raw1, raw4 = rows
    # busbw 2 GB/s on each of two connections, of a host that moves 8 GB/s.
    assert large.busbw_gb_s == pytest.approx(2.0)
    assert large.share_of_raw == pytest.approx(0.5)
    assert (raw1.share_of_raw, raw4.share_of_raw) == pytest.approx((5 / 8, 1.0))
    assert (small.verified, large.verified, raw1.verified) == (True, False, None)
    assert large.note == "WRONG DATA"
    assert [row.backend for row in best_raw_only(rows)] == ["plugin", "plugin", "raw x4"]
    assert results.wrong() == [("plugin", 4 * MIB, "rank 1: 3 wrong")]


@pytest.mark.parametrize(
    ("cpus", "streams"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32]), (192, [1, 2, 4, 8, 16, 32, 64])],
)
def test_default_raw_streams(cpus: int, streams: list[int]) -> None:
    assert default_raw_streams(cpus) == streams
