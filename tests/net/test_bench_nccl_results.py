"""Figures of the GPU comparison: rows, ratios, and which of NCCL's own settings is the best of each size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.played_comparison import CASES, DEFAULT, OURS, TUNED, Stage

from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.results import NOISE, Results, results_of

SMALL, LARGE = (case.bytes for case in CASES)
MEMORY = Backend("shared memory", "Socket", shared_memory=True)


def results(stage: Stage) -> Results:
    return results_of(stage.cases, stage.groups, stage.run(), 2)


def test_ratios_compare_ours_with_each_other_backend_within_repetitions() -> None:
    found = {(ratio.case.bytes, ratio.baseline): ratio.speedup.median for ratio in results(Stage()).ratios}
    assert found == {
        (SMALL, "NCCL default"): pytest.approx(4.0),
        (SMALL, "NCCL t2s2"): pytest.approx(2.0),
        (LARGE, "NCCL default"): pytest.approx(4.0),
        (LARGE, "NCCL t2s2"): pytest.approx(2.0),
    }


def test_cpu_time_per_gigabyte_counts_the_bytes_on_all_links() -> None:
    rows = {(row.bytes, row.backend): row for row in results(Stage()).rows}
    assert rows[SMALL, "bagua-net"].cpu_s_per_gb is None, "launching would be all that is counted"
    # 100 iterations of 2 (W - 1) MiB took both ranks 0.5 s each.
    assert rows[LARGE, "bagua-net"].cpu_s_per_gb == pytest.approx(1.0 / (100 * 2 * (1 << 20) / 1e9))


def test_the_best_setting_is_chosen_for_each_size_and_shared_memory_is_none_of_them() -> None:
    stage = Stage(
        [
            (DEFAULT, {SMALL: 0.002, LARGE: 0.008}),
            (TUNED, {SMALL: 0.004, LARGE: 0.003}),
            (replace(TUNED, name="NCCL t4s1 16ch"), {SMALL: 0.003, LARGE: 0.006}),
            (OURS, {SMALL: 0.001, LARGE: 0.006}),
            (MEMORY, 0.0005),
        ]
    )
    found = results(stage)
    best = found.best_of("all_reduce")
    assert {size: one.setting for size, one in best.items()} == {SMALL: "default", LARGE: "t2s2"}
    small, large = best[SMALL].ratio, best[LARGE].ratio
    assert small is not None
    assert large is not None
    assert small.speedup.median == pytest.approx(2.0)
    assert large.speedup.median == pytest.approx(0.5)
    assert [ratio.is_slower for ratio in found.ratios_to("best tuned", "all_reduce")] == [False, True]
    assert best[LARGE].row.time_us == pytest.approx(3000)


def test_the_best_is_that_of_the_median_and_is_paired_repetition_by_repetition() -> None:
    stage = Stage()
    outcome = stage.run()
    case = CASES[0]

    def played(index: int, seconds: list[float]) -> None:
        timings = outcome.timings[case, index]
        outcome.timings[case, index] = [replace(one, seconds=s) for one, s in zip(timings, seconds, strict=True)]

    played(0, [0.001, 0.009, 0.009])  # the fastest single repetition, and the slower median
    played(1, [0.004, 0.004, 0.008])
    played(2, [0.004, 0.002, 0.001])
    best = results_of(CASES, stage.groups, outcome, 2).best_of("all_reduce")[case.bytes]
    assert best.setting == "t2s2"
    assert best.ratio is not None
    ratio = best.ratio.speedup
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.0, 2.0, 8.0))


def test_one_setting_of_nccl_alone_is_not_called_the_best() -> None:
    assert results(Stage([(DEFAULT, 0.002), (OURS, 0.001), (MEMORY, 0.0005)])).best == []


def test_without_our_plugin_there_is_a_best_and_no_ratio() -> None:
    found = results(Stage([(DEFAULT, 0.002), (TUNED, 0.001)]))
    assert [(one.setting, one.ratio) for one in found.best] == [("t2s2", None), ("t2s2", None)]
    assert found.ratios == []


def test_a_setting_that_failed_on_the_way_cannot_be_the_best() -> None:
    stage = Stage()
    stage.worker(1, 0).dies_at = 2 * len(CASES) + 2
    found = results(stage)
    assert {row.backend for row in found.rows if row.bytes == SMALL} >= {"NCCL t2s2"}, "it keeps what it measured"
    assert {one.setting for one in found.best} == {"default"}
    assert all(one.ratio is not None for one in found.best)


@pytest.mark.parametrize(("ours", "slower"), [(0.001, False), (0.00102, False), (0.00104, True), (0.0005, False)])
def test_slower_is_what_is_slower_by_more_than_the_noise(ours: float, slower: bool) -> None:
    assert NOISE == 0.03
    (ratio, *_) = results(Stage([(DEFAULT, 0.001), (OURS, ours)])).ratios
    assert ratio.is_slower is slower
