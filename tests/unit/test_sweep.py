"""tools/sweep without networks: options, plan, winners, report. A real run is in tests/net/test_sweep_run.py."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.catalogue import ALGORITHMS, ALL_REDUCE
from measure.core.step_statistics import Row
from netlab import DelayUsage, NetlabError
from sweep import cli
from sweep.grid import Network, PlannedNetwork, in_measuring_order, plan_networks
from sweep.options import parse_options
from sweep.report import report_of, winner_text
from sweep.results import NetworkResult, Winner, winner_of
from sweep.sweep_run import SweepInterruptedError, SweepOutcome, run_sweep

from bagua.net.bench.errors import BenchError
from bagua.net.bench.verdict import PairedRatio


def row(algorithm: str, speed_up: float | None = None, low: float | None = None, **changes: Any) -> Row:
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Row)}
    fields |= {
        "model": "wide",
        "algorithm": algorithm,
        "rounds": 2,
        "step_ms": 100.0 / (speed_up or 1.0),
        "step_ms_by_round": [],
        "speed_up": None if speed_up is None else PairedRatio(speed_up, speed_up if low is None else low, speed_up),
        "own_cores": 1.0,
        "replicas_agree": True,
        "promise": ALGORITHMS[algorithm].promise.value,
    }
    return Row(**{**fields, **changes})


BASE = row(ALL_REDUCE)


class TestPlan:
    def test_rates_that_the_machine_cannot_move_are_measured_once(self) -> None:
        planned = plan_networks([1, 10, 25, 100], [0, 5], {False: 30.0, True: 12.0})
        assert planned == [
            *(PlannedNetwork(Network(rate, 0)) for rate in (1, 10, 25)),
            PlannedNetwork(Network(100, 0), is_limited=False),
            *(PlannedNetwork(Network(rate, 5)) for rate in (1, 10)),
            PlannedNetwork(Network(25, 5), is_limited=False),
            PlannedNetwork(Network(100, 5), is_limited=False, measured_as=Network(25, 5)),
        ]

    def test_headers_are_no_reason_to_give_a_rate_up(self) -> None:
        """What a probe counts is payload."""
        (planned,) = plan_networks([10], [0], {False: 9.4})
        assert planned.is_limited

    def test_short_steps_come_first(self) -> None:
        planned = plan_networks([1, 10, 25], [5, 0], {False: 12.0, True: 12.0})
        order = [(one.network.delay_ms, one.network.rate_gbit) for one in in_measuring_order(planned)]
        assert order == [(0, 25), (0, 10), (0, 1), (5, 25), (5, 10), (5, 1)]

    def test_buffers_hold_what_is_under_way(self) -> None:
        assert Network(10, 0).tcp_buffer_bytes is None, "the machine's own"
        assert Network(10, 20).tcp_buffer_bytes == 4 * 50_000_000
        assert Network(1, 1).tcp_buffer_bytes == 32 << 20
        assert Network(100, 100).tcp_buffer_bytes == 512 << 20


class TestWinner:
    def test_the_fastest_in_every_round_wins(self) -> None:
        rows = [BASE, row("bytegrad", 2.0), row("qadam", 3.0, low=0.9), row("ddp-fp16", 1.5)]
        assert winner_of(rows, replicas_equal=True) == Winner("bytegrad", 2.0)

    def test_what_is_hardly_faster_wins_nothing(self) -> None:
        assert winner_of([BASE, row("bytegrad", 1.04)], replicas_equal=True) == Winner(ALL_REDUCE, 1.0)

    def test_another_all_reduce_is_no_other_algorithm(self) -> None:
        rows = [BASE, row("torch-ddp", 1.5), row("ddp-bytegrad", 1.1)]
        assert winner_of(rows, replicas_equal=False) == Winner("ddp-bytegrad", 1.1)

    def test_replicas_that_differ_and_ranks_that_do_not_wait_can_be_left_out(self) -> None:
        rows = [BASE, row("async", 9.0), row("decentralized", 3.0), row("bytegrad", 2.0)]
        assert winner_of(rows, replicas_equal=False) == Winner("async", 9.0)
        assert winner_of(rows, replicas_equal=False, waiting=True) == Winner("decentralized", 3.0)
        assert winner_of(rows, replicas_equal=True) == Winner("bytegrad", 2.0)

    def test_without_all_reduce_nobody_wins(self) -> None:
        assert winner_of([row("bytegrad")], replicas_equal=True) is None
        assert winner_text(None) == "-"


def settings(*words: str) -> argparse.Namespace:
    return parse_options(["--algorithms", "with-bagua,bytegrad,async", *words])


def result(network: Network, rows: Sequence[Row] = (), **changes: Any) -> NetworkResult:
    return NetworkResult(network, is_limited=True, rows=list(rows), **changes)


class TestRun:
    def run(
        self, seconds: float, limit: float, fails: Sequence[float] = ()
    ) -> tuple[list[tuple[float, float]], SweepOutcome]:
        """Every network takes `seconds`. Returns (rate, share of the time) of each that was measured."""
        now = [0.0]
        seen: list[tuple[float, float]] = []

        def measure(planned: PlannedNetwork, options: Any) -> NetworkResult:
            seen.append((planned.network.rate_gbit, options.time_limit))
            now[0] += seconds
            if planned.network.rate_gbit in fails:
                raise BenchError("a rank died") if planned.network.rate_gbit == 1 else NetlabError("no namespace")
            return result(planned.network, [BASE])

        planned = plan_networks([1, 2, 4], [0], {False: 100})
        given = settings("--time-limit", str(limit))
        return seen, run_sweep(given, planned, measure, clock=lambda: now[0])

    def test_what_one_network_leaves_the_others_share(self) -> None:
        seen, outcome = self.run(seconds=10, limit=90)
        assert seen == [(1, 30), (2, 40), (4, 70)]
        assert [one.seconds for one in outcome.results] == [10, 10, 10]

    def test_networks_after_the_time_limit_are_named(self) -> None:
        seen, outcome = self.run(seconds=50, limit=90)
        assert [rate for rate, _ in seen] == [1, 2]
        assert outcome.errors[0].startswith("--time-limit 90 s was over before 4 Gb/s, 0 ms;")

    def test_a_network_that_fails_costs_only_itself(self) -> None:
        _, outcome = self.run(seconds=1, limit=90, fails=[1, 2])
        assert outcome.errors == ["1 Gb/s, 0 ms: a rank died", "2 Gb/s, 0 ms: no namespace"]
        assert [len(one.rows) for one in outcome.results] == [1]

    @pytest.mark.parametrize("has_ranks", [True, False])
    def test_what_was_measured_before_an_interruption_is_kept(self, has_ranks: bool) -> None:
        known: list[int] = []

        def measure(one: PlannedNetwork, _: Any) -> NetworkResult:
            if one.network.rate_gbit == 2:
                if not has_ranks:
                    raise KeyboardInterrupt
                raise SweepInterruptedError(result(one.network, [row("bytegrad")]))
            return result(one.network, [BASE])

        planned = plan_networks([1, 2, 4], [0], {False: 100})
        outcome = run_sweep(settings(), planned, measure, lambda so_far: known.append(len(so_far.results)))
        assert len(outcome.results) == (2 if has_ranks else 1)
        assert known == [1, len(outcome.results)], "what is known after each network is handed out"
        assert outcome.errors == ["interrupted; networks not begun: 1"]


CAPACITY = {False: 100.0, True: 12.0}
PLANNED = plan_networks([10, 25, 100], [0, 5], CAPACITY)


def sweep_outcome() -> SweepOutcome:
    """25 Gb/s with a delay is what the machine moves; 100 without one was not measured."""
    usage = DelayUsage(packets=10, bytes=1000, refused=0, full=0, mean_late_ms=0.5, most_late_ms=1.0)
    return SweepOutcome(
        [
            result(Network(10, 0), [row(ALL_REDUCE, machine_busy=0.5), row("bytegrad", 2.0, machine_busy=0.7)]),
            result(Network(25, 0), [row(ALL_REDUCE, machine_busy=0.95), row("bytegrad", 0.9, machine_busy=0.95)]),
            result(Network(10, 5), [BASE, row("async", 4.0)], delays=[usage], notes=["one round"], errors=["it broke"]),
            result(Network(25, 5), [BASE, row("bytegrad", 1.5), row("async", 4.5, steps_per_averaging=17.25)]),
        ],
        facts={"torch": "2", "python_compression": "/a/bagua"},
        notes=["too late"],
    )


class TestReport:
    def test_winners_are_a_grid_of_all_rates_and_delays(self) -> None:
        outcome, options = sweep_outcome(), settings()
        text = report_of(PLANNED, options, outcome, CAPACITY).table.rstrip()
        tables = {block.splitlines()[0]: block.splitlines()[1:] for block in text.split("\n\n") if block[:2] == "--"}
        equal, waiting, everything = (
            [" ".join(line.split()) for line in tables[f"-- the fastest, {which} (wide)"]]
            for which in (
                "of those that keep all ranks' parameters the same",
                "of those that wait for other ranks in each step",
                "of all",
            )
        )
        assert equal == [
            "10 Gb/s 25 Gb/s 100 Gb/s",
            "0 ms bytegrad 2.00x all-reduce -",
            "5 ms all-reduce bytegrad 1.50x* bytegrad 1.50x*",
        ]
        assert waiting[2] == "5 ms all-reduce bytegrad 1.50x* bytegrad 1.50x*"
        assert everything[2] == "5 ms async 4.00x async 4.50x* async 4.50x*"

    def test_closing_lines_say_what_limits_and_what_failed(self) -> None:
        report = report_of(PLANNED, settings(), sweep_outcome(), CAPACITY)
        moves = "*: more than this machine moves (100 Gb/s without delay, 12 Gb/s with)"
        assert any(line.startswith(moves) for line in report.lines)
        assert any(line.startswith("steps per average: of async") for line in report.lines)
        assert "CPUs 90 % busy or more, so that they limit as well: 25 Gb/s, 0 ms" in report.lines
        assert "packets were kept 0.50 ms longer than the delay at most, on average (10 Gb/s, 5 ms)" in report.lines
        assert report.notes[0].startswith("/a/bagua has no compiled bagua.kernels._minmax_uint8")
        assert report.notes[1:3] == ["too late", "10 Gb/s, 5 ms: one round"]
        assert report.errors == ["10 Gb/s, 5 ms: it broke"]


class TestProbe:
    def test_without_delays_the_sweep_goes_on_and_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def measure(delay_ms: float, _flows: int) -> float:
            if delay_ms:
                raise NetlabError("netlab: delays need /dev/net/tun, which does not exist here")
            return 20.0

        monkeypatch.setattr(cli, "measure_capacity_gbit", measure)
        capacity, notes = cli.probe(settings())
        assert capacity == {False: 20.0}
        assert notes == ["networks with a delay were left out: delays need /dev/net/tun, which does not exist here"]

    def test_no_delay_is_probed_where_none_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[float] = []
        monkeypatch.setattr(cli, "measure_capacity_gbit", lambda delay_ms, _flows: asked.append(delay_ms) or 20.0)
        assert cli.probe(settings("--delays", "0")) == ({False: 20.0}, [])
        assert asked == [0.0]
