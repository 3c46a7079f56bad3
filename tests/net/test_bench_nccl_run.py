"""The run of the GPU comparison with workers that are played: what fails is reported and ended, the others go on."""

from __future__ import annotations

import pytest
from support.played_comparison import CASES, DEFAULT, OURS, Stage

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.memory import check_memory, needed_bytes
from bagua.net.bench.nccl_ab.plan import Case, make_cases
from bagua.net.bench.nccl_ab.results import results_of


def test_a_good_run_measures_every_backend_alike() -> None:
    outcome = Stage().run()
    assert outcome.errors == []
    assert outcome.stopped_early is None
    # The slowest backend decides: 0.4 s / 4 ms.
    assert outcome.iterations == dict.fromkeys(CASES, 100)
    assert {key: len(timings) for key, timings in outcome.timings.items()} == {
        (case, index): 3 for case in CASES for index in range(3)
    }
    assert set(outcome.verified.values()) == {True}


def test_every_verification_looks_for_other_data() -> None:
    stage = Stage()
    stage.run()
    salts = [command["salt"] for command in stage.worker(0, 0).posted if command["op"] == "verify"]
    assert len(salts) == 2 * len(CASES), "verified before and after the measuring"
    assert len(set(salts)) == len(salts)
    assert salts == [command["salt"] for command in stage.worker(0, 1).posted if command["op"] == "verify"]


def test_single_iterations_are_timed_for_small_sizes_only() -> None:
    outcome = Stage().run()
    assert len(outcome.timings[CASES[0], 0][0].single_seconds) == 100
    assert outcome.timings[CASES[1], 0][0].single_seconds == ()


def test_the_slowest_rank_is_the_time_of_a_turn_and_cpu_time_is_summed() -> None:
    stage = Stage()
    stage.worker(2, 1).seconds = 0.003
    timing = stage.run().timings[CASES[0], 2][0]
    assert timing.seconds == pytest.approx(0.003)
    assert timing.cpu_seconds == 1.0


def test_a_wrong_network_is_found_before_anything_is_measured() -> None:
    stage = Stage()
    stage.worker(2, 1).network = "Socket"
    outcome = stage.run()
    assert len(outcome.errors) == 1
    assert "bagua-net should have used network BaguaNet, but rank 1 used Socket" in outcome.errors[0]
    assert not any(index == 2 for _, index in outcome.timings), "no figure under a wrong name"
    assert len(outcome.timings[CASES[1], 0]) == 3, "the others go on"
    assert stage.worker(2, 0).closed


def test_where_nccl_is_played_by_gloo_no_network_is_asked_for() -> None:
    stage = Stage()
    stage.worker(2, 1).network = "Socket"
    assert stage.run(prove_network=False).errors == []


def test_wrong_data_ends_the_backend_and_names_rank_and_place() -> None:
    stage = Stage()
    stage.worker(1, 1).wrong_at = 2
    outcome = stage.run()
    assert outcome.errors == ["NCCL t2s2: all_reduce of 1048576 B gave 1 wrong elements on rank 1, the first at 17"]
    assert outcome.verified[CASES[1], 1] is False
    assert len(outcome.timings[CASES[1], 2]) == 3


def test_wrong_data_after_the_load_is_an_error_too() -> None:
    stage = Stage()
    stage.worker(2, 0).wrong_at = 3
    outcome = stage.run()
    assert len(outcome.errors) == 1
    rows = results_of(CASES, stage.groups, outcome, 2).rows
    assert [row.verified for row in rows if row.backend == "bagua-net"] == [False, True]


def test_a_crash_in_a_turn_keeps_what_was_measured() -> None:
    stage = Stage()
    stage.worker(0, 1).dies_at = 6
    outcome = stage.run()
    assert len(outcome.errors) == 1
    assert "the network broke" in outcome.errors[0]
    assert stage.worker(0, 0).closed
    assert stage.worker(0, 1).closed
    assert len(outcome.timings[CASES[0], 0]) + len(outcome.timings.get((CASES[1], 0), [])) == 1
    assert len(outcome.timings[CASES[1], 1]) == 3


def test_the_time_limit_ends_the_run_between_cases_and_says_where() -> None:
    stage = Stage()
    # A repetition takes 2.2 s, after some 0.1 s of calibration.
    outcome = stage.run(iterations=100, time_limit_s=3.0)
    assert outcome.errors == []
    assert outcome.stopped_early is not None
    assert "in repetition 2 of 3" in outcome.stopped_early
    assert "more than is left of the time limit of 3 s" in stage.messages.getvalue()
    counts = {len(outcome.timings[case, index]) for case in CASES for index in range(3)}
    assert counts == {1, 2}
    for case in CASES:
        assert len({len(outcome.timings[case, index]) for index in range(3)}) == 1, "complete for all or for none"


def test_turns_are_shortened_to_fit_into_the_time_limit() -> None:
    stage = Stage()
    outcome = stage.run(time_limit_s=3.0)
    assert outcome.stopped_early is None
    assert {len(timings) for timings in outcome.timings.values()} == {3}
    assert set(outcome.verified.values()) == {True}, "verified again, which the plan has left time for"
    assert 1.0 < stage.now <= 3.0
    assert all(count < 100 for count in outcome.iterations.values())
    assert "missing" not in stage.messages.getvalue()


def test_what_the_run_will_take_is_said_before_it_begins() -> None:
    stage = Stage()
    outcome = stage.run()
    (line,) = (line for line in stage.messages.getvalue().splitlines() if line.startswith("about"))
    assert line == "about 7 s for 3 repetitions of 2 sizes by 3 backends, then 0 s to verify again"
    # Two calibrations, one verification before and one after, of every backend: 7 ms an iteration of all three.
    assert stage.now == pytest.approx(outcome.expected_s + 2 * 0.007 * (1 + 5 + 1 + 1))


GIB = 1 << 30
SETTINGS = [Backend(f"NCCL t{number}", "Socket") for number in range(8)]


@pytest.mark.parametrize("others_s_per_gib", [0.05, 0.2])
def test_eleven_backends_up_to_a_gibibyte_fit_into_a_hundred_seconds(others_s_per_gib: float) -> None:
    """Three repetitions of 15 sizes, with 200 ms at 1 GiB for the slowest backend, or for all of them."""
    sizes = [8, *(16 << shift for shift in range(0, 28, 2))]
    cases = make_cases(["all_reduce"], [*sizes[1:], sizes[0]], 2, 4)
    assert (len(cases), max(case.bytes for case in cases)) == (15, GIB)
    slow = {size: 50e-6 + 0.2 * size / GIB for size in sizes}
    fast = {size: 30e-6 + others_s_per_gib * size / GIB for size in sizes}
    memory = Backend("shared memory", "Socket", shared_memory=True)
    stage = Stage([(DEFAULT, slow), *((other, fast) for other in (*SETTINGS, OURS, memory))], cases)
    stage.overhead_s = 0.002
    outcome = stage.run(time_limit_s=100.0, turn_seconds=0.15)
    assert outcome.stopped_early is None
    assert {key: len(timings) for key, timings in outcome.timings.items()} == {
        (case, index): 3 for case in cases for index in range(11)
    }
    assert stage.now <= 100.0
    assert outcome.iterations[Case("all_reduce", GIB)] >= 1
    assert outcome.iterations[Case("all_reduce", 1024)] > 100


def test_a_large_size_is_calibrated_with_as_few_operations_as_possible() -> None:
    stage = Stage([(DEFAULT, 0.2), (OURS, 0.001)], [Case("all_reduce", GIB)])
    stage.run(repetitions=1)

    def calibration(group: int) -> list[tuple[int, int]]:
        timed = [command for command in stage.worker(group, 0).posted if command["op"] == "time"]
        return [(command["iterations"], command["warmup"]) for command in timed[:-1]]

    assert calibration(0) == [(1, 0)]
    assert calibration(1) == [(1, 0), (4, 1)]


def test_memory_is_asked_for_before_the_run_and_the_rank_that_lacks_it_is_named() -> None:
    stage = Stage()
    cases = make_cases(["all_reduce", "all_to_all"], [8, GIB], 2, 2)
    check_memory(stage.groups, cases, 1.0)
    needed = needed_bytes(cases[-1], 2)
    assert 2 * GIB < needed < 3 * GIB, "two buffers of one backend, not of all"
    for worker in (stage.worker(0, 1), stage.worker(1, 1), stage.worker(2, 1)):
        worker.free_bytes = needed - 1
    with pytest.raises(BenchError) as failure:
        check_memory(stage.groups, cases, 1.0)
    for worker in (stage.worker(0, 1), stage.worker(1, 1), stage.worker(2, 1)):
        worker.free_bytes = 2 * needed - 1
    check_memory(stage.groups, cases, 1.0)
    with pytest.raises(BenchError, match="needs 5 GiB"):
        check_memory(stage.groups, cases, 1.0, ranks_per_gpu=2)
    for said in ("all_to_all of 1 GiB needs 2.5 GiB", "rank 1 has 2.5 GiB left", "3 backends", "lower -e/--maxbytes"):
        assert said in str(failure.value)


def test_a_limit_that_passes_while_verifying_measures_nothing_and_says_so() -> None:
    outcome = Stage().run(time_limit_s=0.001)
    assert outcome.stopped_early is not None
    assert "in repetition 1 of 3, before all_reduce of 1 KiB" in outcome.stopped_early
    assert outcome.timings == {}


def test_sizes_that_take_too_long_to_verify_are_given_up_for_the_others() -> None:
    cases = make_cases(["all_reduce"], [1024, 1 << 20, GIB], 2, 2)
    times = {1024: 0.001, 1 << 20: 1.0, GIB: 4.0}
    outcome = Stage([(DEFAULT, times), (OURS, times)], cases).run(time_limit_s=8.0, repetitions=1)
    assert "verifying took 50% of the time limit of 8 s: all_reduce of 1 GiB and what comes after" in outcome.notes[0]
    assert outcome.timings.keys() == {(case, index) for case in cases[:2] for index in (0, 1)}


def test_figures_come_before_the_second_verification() -> None:
    times = {1024: 0.001, 1 << 20: 1.0}
    # 1 MiB: verified and calibrated in 4 s, measured in 2 x 2 s, so that 2 s to verify it again are not left.
    outcome = Stage([(DEFAULT, times), (OURS, times)]).run(time_limit_s=9.0, repetitions=1)
    assert outcome.stopped_early is None
    assert {len(timings) for timings in outcome.timings.values()} == {1}
    assert len(outcome.timings) == 4
    assert all(verified for verified in outcome.verified.values())


def test_given_iterations_and_warmup_are_used_as_they_are() -> None:
    stage = Stage()
    stage.run(iterations=7, warmup=0)
    timed = [command for command in stage.worker(0, 0).posted if command["op"] == "time"][2 * len(CASES) :]
    assert {(command["iterations"], command["warmup"]) for command in timed} == {(7, 0)}


def test_a_group_that_cannot_form_says_why() -> None:
    stage = Stage()
    worker = stage.worker(0, 0)
    worker._answers.append({"event": "error", "message": "no CUDA device"})
    with pytest.raises(BenchError, match="no CUDA device"):
        stage.groups[0].form("127.0.0.1", 1.0)


def test_case_knows_where_latency_matters() -> None:
    assert Case("all_reduce", 64 << 10).wants_latency
    assert not Case("all_reduce", (64 << 10) + 2).wants_latency
