"""The run of every benchmark, with workers that are played in a time of their own: what fails is reported and ended,
the others go on, and the time limit decides how much is measured."""

from __future__ import annotations

import pytest
from support.played_comparison import CASES, DEFAULT, OURS, Stage

from bagua.net.bench.errors import BenchError
from bagua.net.bench.measurement import Case
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.command import prove
from bagua.net.bench.nccl_ab.session import check_memory, make_cases, needed_bytes
from bagua.net.bench.paced_run import PacedRun

GIB = 1 << 30
NAMES = ["NCCL default", "NCCL t2s2", "bagua-net"]


def counts(run: PacedRun) -> dict[tuple[Case, str], int]:
    return {place: len(rounds) for place, rounds in run.turns.samples.items() if rounds}


def test_the_slowest_rank_is_the_time_of_a_turn_and_cpu_time_is_summed() -> None:
    stage = Stage()
    stage.worker(2, 1).seconds = 0.003
    sample = stage.run().turns.of(CASES[0], "bagua-net")[0]
    assert sample.seconds == pytest.approx(0.003)
    assert sample.cpu_seconds == 1.0


def test_a_wrong_network_ends_its_backend() -> None:
    stage = Stage()
    stage.worker(2, 1).network = "Socket"
    (error,) = prove(stage.sessions, 1.0)
    assert "bagua-net should have used network BaguaNet, but rank 1 used Socket" in error
    assert [session.is_alive for session in stage.sessions] == [True, True, False]
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


def test_a_run_that_is_too_long_has_fewer_rounds_of_every_case() -> None:
    stage = Stage()
    run = stage.run(iterations=100, time_limit_s=6.0)  # a round takes 2.2 s
    assert set(counts(run).values()) == {2}
    assert run.turns.notes[0].startswith("2 of 3 rounds ran: another takes 2 s")
    assert "more than is left of --time-limit 9 s; some will be missing" in stage.messages.getvalue()


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


def test_memory_is_asked_for_before_the_run_and_the_rank_that_lacks_it_is_named() -> None:
    stage = Stage()
    cases = make_cases(["all_reduce", "all_to_all"], [8, GIB], 2, 2)
    check_memory(stage.sessions, cases, 1.0)
    needed = needed_bytes(cases[-1], 2)
    assert 2 * GIB < needed < 3 * GIB, "two buffers of one backend, not of all"
    for worker in (stage.worker(0, 1), stage.worker(1, 1), stage.worker(2, 1)):
        worker.free_bytes = needed - 1
    with pytest.raises(BenchError, match=r"all_to_all of 1 GiB needs 2\.5 GiB.*rank 1 has 2\.5 GiB left"):
        check_memory(stage.sessions, cases, 1.0)
    for worker in (stage.worker(0, 1), stage.worker(1, 1), stage.worker(2, 1)):
        worker.free_bytes = 2 * needed - 1
    check_memory(stage.sessions, cases, 1.0)
    with pytest.raises(BenchError, match="needs 5 GiB"):
        check_memory(stage.sessions, cases, 1.0, ranks_per_gpu=2)
