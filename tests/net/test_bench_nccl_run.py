"""The run of the GPU comparison with workers that are played: what fails is reported and ended, the others go on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab_contender import Contender
from bagua.net.bench.nccl_ab_group import Group
from bagua.net.bench.nccl_ab_plan import Case, make_cases
from bagua.net.bench.nccl_ab_report import measurements, ratios, render_closing, render_tables
from bagua.net.bench.nccl_ab_run import ComparisonRun, RunOutcome, RunSettings
from bagua.net.bench.progress import Progress

CASES = make_cases(["all_reduce"], [1024, 1 << 20], 4, 2)


class PlayedWorker:
    """An endpoint whose worker takes `seconds` for an iteration, in a time of its own."""

    def __init__(self, name: str, network: str, seconds: float, advance: Callable[[float], None]) -> None:
        self.name = name
        self.network = network
        self.seconds = seconds
        self.wrong_at: int | None = None  # the verification, counted from 1, that finds a wrong element
        self.dies_at: int | None = None  # the timed turn, counted from 1, at which it ends
        self.posted: list[dict[str, Any]] = []
        self.closed = False
        self._advance = advance
        self._answers: list[Event] = []

    def fileno(self) -> int:
        raise AssertionError("a played worker answers at once; nothing should wait for it")

    def post(self, line: str) -> None:
        if line == "quit":
            return
        command = json.loads(line)
        self.posted.append(command)
        self._answers.append(self._answer(command))

    def _count(self, operation: str) -> int:
        return sum(command["op"] == operation for command in self.posted)

    def _answer(self, command: dict[str, Any]) -> Event:
        if command["op"] == "proof":
            return {
                "event": "proof",
                "network": self.network,
                "table": None,
                "channels": None,
                "nodes": 2,
                "transports": [],
                "plugin_lines": [],
                "warnings": [],
            }
        if command["op"] == "verify":
            wrong = self._count("verify") == self.wrong_at
            return {"event": "verified", "wrong_elements": int(wrong), "first_wrong": 17 if wrong else None}
        if self._count("time") == self.dies_at:
            return {"event": "error", "message": "the network broke"}
        self._advance(self.seconds * command["iterations"])
        return {
            "event": "timed",
            "seconds": self.seconds * command["iterations"],
            "single_seconds": [self.seconds] * command["single"],
            "cpu_seconds": 0.5,
        }

    def next_event(self) -> Event | None:
        return self._answers.pop(0)

    def close(self) -> None:
        self.closed = True


class Stage:
    """Three contenders of two ranks each, and their clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._workers: list[list[PlayedWorker]] = []
        self.groups = [
            self._group(Contender("NCCL default", "Socket"), 0.004),
            self._group(Contender("NCCL t2s2", "Socket"), 0.002),
            self._group(Contender("bagua-net", "BaguaNet", is_ours=True), 0.001),
        ]

    def _group(self, contender: Contender, seconds: float) -> Group:
        workers = [PlayedWorker(f"{contender.name} {rank}", contender.network, seconds, self._pass) for rank in (0, 1)]
        self._workers.append(workers)
        return Group(contender, endpoints=workers)

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def worker(self, group: int, rank: int) -> PlayedWorker:
        return self._workers[group][rank]

    def run(self, **changes: Any) -> RunOutcome:
        values: dict[str, Any] = {
            "repetitions": 3,
            "turn_seconds": 0.4,
            "timeout_s": 5.0,
            "time_limit_s": 1000.0,
            "verify": True,
            "prove_network": True,
        }
        settings = RunSettings(**(values | changes))
        quiet = io.StringIO()
        run = ComparisonRun(self.groups, CASES, settings, lambda n: Progress(n, stream=quiet), lambda: self.now)
        return run.run()


def test_a_good_run_measures_every_contender_alike() -> None:
    outcome = Stage().run()
    assert outcome.errors == []
    assert outcome.stopped_early is None
    # The slowest contender decides: 0.4 s / 4 ms.
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


def test_wrong_data_ends_the_contender_and_names_rank_and_place() -> None:
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
    rows = measurements(CASES, stage.groups, outcome, 2)
    assert [row.verified for row in rows if row.contender == "bagua-net"] == [False, True]


def test_a_crash_in_a_turn_keeps_what_was_measured() -> None:
    stage = Stage()
    stage.worker(0, 1).dies_at = 4
    outcome = stage.run()
    assert len(outcome.errors) == 1
    assert "the network broke" in outcome.errors[0]
    assert stage.worker(0, 0).closed
    assert stage.worker(0, 1).closed
    assert len(outcome.timings[CASES[0], 0]) + len(outcome.timings.get((CASES[1], 0), [])) == 1
    assert len(outcome.timings[CASES[1], 1]) == 3


def test_the_time_limit_ends_the_run_between_cases_and_says_where() -> None:
    stage = Stage()
    # 700 iteration-milliseconds a case and repetition, after some 60 of calibration.
    outcome = stage.run(time_limit_s=2.0)
    assert outcome.errors == []
    assert outcome.stopped_early is not None
    assert "in repetition 2 of 3" in outcome.stopped_early
    counts = {len(outcome.timings[case, index]) for case in CASES for index in range(3)}
    assert counts <= {1, 2}
    for case in CASES:
        assert len({len(outcome.timings[case, index]) for index in range(3)}) == 1, "complete for all or for none"


def test_a_limit_that_ends_the_verification_measures_nothing() -> None:
    outcome = Stage().run(time_limit_s=0.001)
    assert outcome.stopped_early is not None
    assert "while verifying" in outcome.stopped_early
    assert outcome.timings == {}


def test_given_iterations_and_warmup_are_used_as_they_are() -> None:
    stage = Stage()
    stage.run(iterations=7, warmup=0)
    timed = [command for command in stage.worker(0, 0).posted if command["op"] == "time"][len(CASES) :]
    assert {(command["iterations"], command["warmup"]) for command in timed} == {(7, 0)}


def test_ratios_compare_ours_with_each_other_contender_within_repetitions() -> None:
    stage = Stage()
    outcome = stage.run()
    found = {(ratio.case.bytes, ratio.baseline): ratio.speedup.median for ratio in ratios(CASES, stage.groups, outcome)}
    assert found == {
        (1024, "NCCL default"): pytest.approx(4.0),
        (1024, "NCCL t2s2"): pytest.approx(2.0),
        (1 << 20, "NCCL default"): pytest.approx(4.0),
        (1 << 20, "NCCL t2s2"): pytest.approx(2.0),
    }


def test_the_tables_and_the_closing_lines() -> None:
    stage = Stage()
    outcome = stage.run()
    outcome.errors.append("something broke")
    found = ratios(CASES, stage.groups, outcome)
    rows = measurements(CASES, stage.groups, outcome, 2)
    table = render_tables(rows, found, [group.contender.name for group in stage.groups]).splitlines()
    assert table[0] == "all_reduce: time in us (busbw in GB/s), median over repetitions"
    assert table[1].split("  ")[-1] == "verified"
    assert table[2].split() == [
        *("1", "KiB", "4000", "(0.00026)", "2000", "(0.00051)", "1000", "(0.001)"),
        *("4.00x", "yes"),
    ]
    closing = render_closing(stage.groups, found, outcome, ["a note"]).splitlines()
    assert "network of bagua-net: Using network BaguaNet" in closing
    assert "note: a note" in closing
    assert closing[-1] == "ERROR: something broke"
    assert any(line.startswith("all_reduce, bagua-net over NCCL default: 4.00x") for line in closing)


def test_cpu_time_per_gigabyte_counts_the_bytes_on_all_links() -> None:
    stage = Stage()
    outcome = stage.run()
    rows = {(row.bytes, row.contender): row for row in measurements(CASES, stage.groups, outcome, 2)}
    assert rows[1024, "bagua-net"].cpu_s_per_gb is None, "launching would be all that is counted"
    # 100 iterations of 2 (W - 1) MiB took both ranks 0.5 s each.
    assert rows[1 << 20, "bagua-net"].cpu_s_per_gb == pytest.approx(1.0 / (100 * 2 * (1 << 20) / 1e9))


def test_a_group_that_cannot_form_says_why() -> None:
    stage = Stage()
    worker = stage.worker(0, 0)
    worker._answers.append({"event": "error", "message": "no CUDA device"})
    with pytest.raises(BenchError, match="no CUDA device"):
        stage.groups[0].form("127.0.0.1", 1.0)


def test_case_knows_where_latency_matters() -> None:
    assert Case("all_reduce", 64 << 10).wants_latency
    assert not Case("all_reduce", (64 << 10) + 2).wants_latency
