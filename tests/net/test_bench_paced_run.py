"""The run of every benchmark, with workers that are played in a time of their own: what fails is reported and ended,
the others go on, and the time limit decides how much is measured."""

from __future__ import annotations

import pytest
from support.played_comparison import CASES, DEFAULT, OURS, Stage

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.command import prove
from bagua.net.bench.nccl_ab.memory import check_memory, needed_bytes
from bagua.net.bench.nccl_ab.plan import make_cases
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.sample import Case

GIB = 1 << 30
NAMES = ["NCCL default", "NCCL t2s2", "bagua-net"]


def counts(run: PacedRun) -> dict[tuple[Case, str], int]:
    return {place: len(rounds) for place, rounds in run.turns.samples.items() if rounds}


def test_a_good_run_measures_every_backend_equally_often() -> None:
    run = Stage().run()
    assert (run.turns.errors, run.turns.notes, run.wrong) == ([], [], {})
    # The slowest backend decides: 0.4 s / 4 ms.
    assert {case: plan.iterations for case, plan in run.turn_plans.items()} == dict.fromkeys(CASES, 100)
    assert counts(run) == {(case, name): 3 for case in CASES for name in NAMES}
    assert set(run.verified.values()) == {True}
    small, large = (run.turns.of(case, "bagua-net")[0] for case in CASES)
    assert (len(small.iteration_seconds), large.iteration_seconds) == (100, ()), "single ones of small sizes only"


def test_every_verification_looks_for_other_data() -> None:
    stage = Stage()
    stage.run()
    salts = [command["salt"] for command in stage.worker(0, 0).posted if command["op"] == "verify"]
    assert len(salts) == 2 * len(CASES), "verified before and after the measuring"
    assert len(set(salts)) == len(salts)
    assert salts == [command["salt"] for command in stage.worker(0, 1).posted if command["op"] == "verify"]


def test_the_slowest_rank_is_the_time_of_a_turn_and_cpu_time_is_summed() -> None:
    stage = Stage()
    stage.worker(2, 1).seconds = 0.003
    sample = stage.run().turns.of(CASES[0], "bagua-net")[0]
    assert sample.seconds == pytest.approx(0.003)
    assert sample.cpu_seconds == 1.0


def test_a_wrong_network_ends_its_backend() -> None:
    stage = Stage()
    stage.worker(2, 1).network = "Socket"
    (error,) = prove(stage.groups, 1.0)
    assert "bagua-net should have used network BaguaNet, but rank 1 used Socket" in error
    assert [group.is_alive for group in stage.groups] == [True, True, False]
    assert stage.worker(2, 0).closed


@pytest.mark.parametrize(("at", "case"), [(2, 1), (3, 0)], ids=["before", "after the load"])
def test_wrong_data_is_told_with_rank_and_place(at: int, case: int) -> None:
    stage = Stage()
    stage.worker(1, 1).wrong_at = at
    run = stage.run()
    assert run.wrong == {(CASES[case], "NCCL t2s2"): "1 wrong elements on rank 1, the first at 17"}
    assert run.verified[CASES[case], "NCCL t2s2"] is False
    assert run.verified[CASES[1 - case], "NCCL t2s2"] is True
    assert run.faults() == [f"WRONG DATA: NCCL t2s2, {CASES[case]}: 1 wrong elements on rank 1, the first at 17"]


def test_a_crash_in_a_turn_keeps_what_was_measured() -> None:
    stage = Stage()
    stage.worker(0, 1).dies_at = 6
    run = stage.run()
    (error,) = run.turns.errors
    assert "the network broke" in error
    assert stage.worker(0, 0).closed
    assert counts(run) == {
        **{(case, name): 3 for case in CASES for name in NAMES[1:]},
        (CASES[0], "NCCL default"): 1,
    }


def test_without_giving_up_a_failure_ends_the_run() -> None:
    stage = Stage()
    stage.worker(0, 1).dies_at = 6
    with pytest.raises(BenchError, match="the network broke"):
        stage.run(give_up=False)


def test_a_run_that_is_too_long_has_fewer_rounds_of_every_case() -> None:
    stage = Stage()
    run = stage.run(iterations=100, time_limit_s=6.0)  # a round takes 2.2 s
    assert set(counts(run).values()) == {2}
    assert run.turns.notes[0].startswith("2 of 3 rounds ran: another takes 2 s")
    assert "more than is left of --time-limit 9 s; some will be missing" in stage.messages.getvalue()


def test_turns_are_shortened_to_fit_into_the_time_limit() -> None:
    stage = Stage()
    run = stage.run(time_limit_s=3.0)
    assert set(counts(run).values()) == {3}
    assert set(run.verified.values()) == {True}
    assert run.turns.notes == [], "verified again, which the plan has left time for"
    assert 1.0 < stage.now <= 3.0
    assert all(plan.iterations < 100 for plan in run.turn_plans.values())


@pytest.mark.parametrize("others_s_per_gib", [0.05, 0.2])
def test_eleven_backends_up_to_a_gibibyte_fit_into_a_hundred_seconds(others_s_per_gib: float) -> None:
    """Three repetitions of 15 sizes, with 200 ms at 1 GiB for the slowest backend, or for all of them."""
    sizes = [8, *(16 << shift for shift in range(0, 28, 2))]
    cases = make_cases(["all_reduce"], sizes, 2, 4)
    slow = {size: 50e-6 + 0.2 * size / GIB for size in sizes}
    fast = {size: 30e-6 + others_s_per_gib * size / GIB for size in sizes}
    settings = [Backend(f"NCCL t{number}", "Socket") for number in range(9)]
    stage = Stage([(DEFAULT, slow), *((other, fast) for other in (*settings, OURS))], cases)
    stage.overhead_s = 0.002
    run = stage.run(time_limit_s=100.0, turn_s=0.15)
    assert set(counts(run).values()) == {3}
    assert len(counts(run)) == 15 * 11
    assert stage.now <= 100.0
    assert run.turn_plans[Case("all_reduce", 1024)].iterations > 100


def test_sizes_that_would_take_too_long_to_verify_are_left_out_with_a_note() -> None:
    times = {1024: 0.001, 1 << 20: 0.25, GIB: 10.0}
    cases = make_cases(["all_reduce"], list(times), 2, 2)
    run = Stage([(DEFAULT, times), (OURS, times)], cases).run(time_limit_s=8.0, rounds=1)
    assert run.turns.notes[0].startswith("left out: all_reduce of 1 GiB: no time was left of --time-limit 9 s")
    assert {case for case, _ in counts(run)} == set(cases[:2])
    with pytest.raises(BenchError, match="The time ended before anything was measured"):
        Stage().run(time_limit_s=0.0)


def test_figures_come_before_the_second_verification() -> None:
    times = {1024: 0.001, 1 << 20: 1.0}
    # 1 MiB: verified and timed in 4 s, measured in 2 x 2 s, so that 2 s to verify it again are not left.
    run = Stage([(DEFAULT, times), (OURS, times)]).run(time_limit_s=8.0, rounds=1)
    assert set(counts(run).values()) == {1}
    assert len(counts(run)) == 4


def test_given_iterations_and_warmup_are_used_as_they_are() -> None:
    stage = Stage()
    stage.run(iterations=7, warmup=0)
    timed = [command for command in stage.worker(0, 0).posted if command["op"] == "time"]
    assert {(command["iterations"], command["warmup"]) for command in timed[-6:]} == {(7, 0)}


def test_memory_is_asked_for_before_the_run_and_the_rank_that_lacks_it_is_named() -> None:
    stage = Stage()
    cases = make_cases(["all_reduce", "all_to_all"], [8, GIB], 2, 2)
    check_memory(stage.groups, cases, 1.0)
    needed = needed_bytes(cases[-1], 2)
    assert 2 * GIB < needed < 3 * GIB, "two buffers of one backend, not of all"
    for worker in (stage.worker(0, 1), stage.worker(1, 1), stage.worker(2, 1)):
        worker.free_bytes = needed - 1
    with pytest.raises(BenchError, match=r"all_to_all of 1 GiB needs 2\.5 GiB.*rank 1 has 2\.5 GiB left"):
        check_memory(stage.groups, cases, 1.0)
    for worker in (stage.worker(0, 1), stage.worker(1, 1), stage.worker(2, 1)):
        worker.free_bytes = 2 * needed - 1
    check_memory(stage.groups, cases, 1.0)
    with pytest.raises(BenchError, match="needs 5 GiB"):
        check_memory(stage.groups, cases, 1.0, ranks_per_gpu=2)
