"""`measure convergence` without ranks: statistics, verdicts, the order of trainings, output. Tasks are in
test_convergence.py, real ranks in tests/distributed/test_convergence.py."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.convergence import statistics
from measure.convergence.catalogue import BASELINE, CASES
from measure.convergence.earlier import together
from measure.convergence.figure import style_of, write_figure
from measure.convergence.report import report_of
from measure.convergence.statistics import (
    HOLDS,
    Difference,
    TrainingResult,
    difference_of,
    faults_of,
    reached,
    relative_difference_of,
    rows_of,
    software_of,
    verdict,
)
from measure.convergence.tool import ConvergenceRun, parse_options, plan_of

from bagua.net.bench.errors import BenchError
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress
from bagua.net.bench.turns import Turns

FACTS = {"torch": "2.13.0", "python": "3.11.7", "device": "cpu", "threads": 1}
POINTS = [0, 50, 100]


def options(*words: str) -> argparse.Namespace:
    return parse_options(["--device", "cpu", *words])


def training(case: str, seed: int, test_loss: float, accuracy: float | None = 0.9, **changes: Any) -> TrainingResult:
    fields: dict[str, Any] = {
        "task": "digits",
        "case": case,
        "seed": seed,
        "steps": 100,
        "seconds": 2.0,
        "train_loss": test_loss / 2,
        "test_loss": test_loss,
        "accuracy": accuracy,
        "replica_test_loss": test_loss,
        "spread": 0.0,
        "averages": None,
        "staleness": None,
        "curve_steps": POINTS,
        "curve_loss": [3.0, 2 * test_loss, test_loss],
        "curve_bytes": [0.0, 5e6, 10e6],
        "source": "digits 1",
        "software": "torch 2",
    }
    return TrainingResult(**{**fields, **changes})


class TestStatistics:
    def test_differences_are_paired(self) -> None:
        """Seeds differ more than algorithms do, and their spread is not the error of the difference."""
        gap = difference_of([11.0, 21.0, 31.5], [10.0, 20.0, 30.0])
        assert gap.mean == pytest.approx(3.5 / 3)
        assert gap.error == pytest.approx(0.5 / 3)
        relative = relative_difference_of([11.0, 21.0], [10.0, 20.0])
        assert (relative.mean, relative.error) == pytest.approx((100 / 15, 0.0))
        assert difference_of([1.0], [0.5]) == Difference(0.5, None)

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    def test_what_is_no_number_is_close_to_nothing(self, broken: float) -> None:
        assert difference_of([broken, 1.0], [1.0, 1.0]).mean == math.inf
        assert relative_difference_of([broken], [1.0]).mean == math.inf
        trainings = [training(BASELINE, 1, 0.1), training("bytegrad", 1, broken)]
        row = rows_of([*trainings, training(BASELINE, 2, 0.1), training("bytegrad", 2, 0.1)])[1]
        assert row.falls_short
        assert row.verdict == "falls short: diverged with 1 of 2 seeds"

    @pytest.mark.parametrize(
        ("train", "test", "accuracy", "says"),
        [
            (0.99, 0.99, -0.49, HOLDS),
            (1.0, 1.0, -0.5, HOLDS),
            (-30.0, -5.0, +3.0, HOLDS),
            (0.0, 1.01, 0.0, "falls short: test loss +1 %"),
            (2.5, 0.0, -0.51, "falls short: train loss +2.5 %, accuracy -0.51 points"),
            (0.0, math.nan, None, "falls short: test loss +nan %"),
            (0.0, 0.0, math.nan, "falls short: accuracy +nan points"),
        ],
    )
    def test_verdicts(self, train: float, test: float, accuracy: float | None, says: str) -> None:
        points = None if accuracy is None else Difference(accuracy, 0.1)
        assert verdict(Difference(train, 0.1), Difference(test, None), points) == says

    def test_rows(self) -> None:
        trainings = [training("bytegrad", seed, loss, acc) for seed, loss, acc in ((1, 0.101, 0.92), (2, 0.203, 0.93))]
        trainings += [
            training(BASELINE, seed, loss, acc) for seed, loss, acc in ((1, 0.1, 0.94), (2, 0.2, 0.92), (3, 9, 0))
        ]
        baseline, ours = rows_of(trainings)
        assert (baseline.case, baseline.verdict, baseline.seeds) == (BASELINE, "", 3)
        assert ours.test_loss.mean == pytest.approx(0.152)
        assert ours.test_loss_difference is not None
        assert ours.test_loss_difference.mean == pytest.approx(0.002 / 0.15 * 100)  # of the seeds that both have
        assert ours.accuracy_difference is not None
        assert ours.accuracy_difference.mean == pytest.approx(-0.5)
        assert ours.steps_per_second == 50
        assert ours.verdict == "falls short: train loss +1.3 %, test loss +1.3 %"

    def test_without_its_baseline_nothing_holds(self) -> None:
        (row,) = rows_of([training("bytegrad", 1, 0.1)])
        assert row.falls_short

    def test_losses_alone_make_a_verdict(self) -> None:
        rows = rows_of([training(case, 1, 0.1, None, task="photographs") for case in (BASELINE, "bytegrad")])
        assert [row.verdict for row in rows] == ["", HOLDS]
        assert rows[0].accuracy is rows[1].accuracy_difference is None

    def test_replicas_that_differ_are_a_fault_of_some(self) -> None:
        apart = [training(case, 2, 0.1, spread=1e-9) for case in ("bytegrad", "async", "decentralized", "qadam")]
        assert [fault.split(":")[0] for fault in faults_of(apart)] == [
            "bytegrad with digits, seed 2",
            "qadam with digits, seed 2",
        ]
        assert faults_of([training("bytegrad", 1, 0.1, spread=math.nan)])

    def test_a_training_is_as_long_as_on_its_slowest_rank(self) -> None:
        event = {"steps": 4, "train_loss": 1, "test_loss": 2, "accuracy": None, "replica_test_loss": 2, "spread": 0.0}
        event.update(averages=4, staleness=1.5, source="digits 1", curve_steps=[0], curve_loss=[2])
        events = [{**event, "seconds": seconds, "curve_bytes": [10 * seconds]} for seconds in (1.0, 3.0)]
        found = statistics.training_result("digits", "async", 1, events, "torch 2")
        assert (found.seconds, found.curve_bytes) == (3.0, [20.0])

    def test_the_same_loss_is_reached_between_two_evaluations(self) -> None:
        """The baseline ends with 0.2, so that 0.202 counts; between steps 50 and 100 the loss falls from 0.4."""
        one = training("bytegrad", 1, 0.2, curve_bytes=[0.0, 1e6, 2e6])
        found = reached(one, 0.2 * 1.01)
        assert found is not None
        assert found.steps == pytest.approx(100 - 50 * 0.002 / 0.2)
        assert found.sent == pytest.approx(2e6 - 1e6 * 0.002 / 0.2)
        rows = rows_of([training(BASELINE, 1, 0.2), one, training(BASELINE, 2, 0.2), replace(one, seed=2)])
        assert rows[1].reached == found
        assert rows[0].reached is not None
        assert rows[0].reached.steps == found.steps
        assert (rows[0].bytes_per_step, rows[1].bytes_per_step) == (1e5, 2e4)

    def test_who_never_has_the_same_loss_with_one_seed_has_none(self) -> None:
        assert reached(training("bytegrad", 1, 0.21), 0.2 * 1.01) is None
        diverged = training("bytegrad", 1, math.nan, curve_loss=[3.0, math.nan, math.nan])
        assert reached(diverged, 0.2) is None
        trainings = [training(BASELINE, seed, 0.2) for seed in (1, 2)]
        trainings += [training("bytegrad", seed, loss) for seed, loss in ((1, 0.2), (2, 0.21))]
        assert rows_of(trainings)[1].reached is None

    def test_a_loss_that_comes_back_from_infinity(self) -> None:
        found = reached(training("bytegrad", 1, 0.1, curve_loss=[3.0, math.inf, 0.1]), 0.2)
        assert found == statistics.Reached(100.0, 10e6)

    @pytest.mark.parametrize("changes", [{"source": "digits 2"}, {"software": "torch 3"}, {"steps": 7}])
    def test_trainings_that_are_not_comparable(self, changes: dict[str, Any]) -> None:
        trainings = [training(BASELINE, 1, 0.2), training("bytegrad", 1, 0.2)]
        other_task = training(BASELINE, 1, 0.2, task="text", source="Python 3.11.7")
        assert statistics.mixed_trainings([*trainings, other_task]) == []
        (found,) = statistics.mixed_trainings([*trainings, training("async", 1, 0.2, **changes)])
        assert found.startswith(f"digits: trainings that differ in {next(iter(changes))} cannot be in one table: ")
        assert str(next(iter(changes.values()))) in found

    def test_averages_count_over_all_seeds(self) -> None:
        trainings = [training("async", seed, 0.1, averages=count) for seed, count in ((1, 10), (2, 30))]
        assert rows_of(trainings)[0].steps_per_average == 5
        assert rows_of([training("async", 1, 0.1, averages=0)])[0].steps_per_average is None


class StubTeam:
    def __init__(self, answer: Callable[[Mapping[str, Any]], list[Any]]) -> None:
        self.facts = {"torch": "2.13.0", "device": "cpu", "threads": 1}
        self.closed: list[bool] = []
        self._answer = answer

    def ask(self, operation: str, timeout_s: float, **fields: Any) -> list[Any]:
        assert (operation, timeout_s) == ("train", 300.0)
        return self._answer(fields)

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def answers(seconds: float = 1.0) -> list[Any]:
    one = {
        "event": "train",
        "steps": 10,
        "seconds": seconds,
        "parameters": 5,
        "train_loss": 0.1,
        "test_loss": 0.2,
        "accuracy": 0.9,
        "replica_test_loss": 0.2,
        "spread": 0.0,
        "averages": None,
        "staleness": None,
        "curve_steps": POINTS,
        "curve_loss": [3, 2, 0.2],
        "curve_bytes": [0.0, 5e6, 10e6],
        "source": "digits 1",
        "train_samples": 100,
        "test_samples": 20,
    }
    return [one, dict(one)]


class TestOptions:
    def test_a_gpu_gets_the_larger_text_and_more_seeds(self) -> None:
        cpu, gpu = options(), parse_options(["--device", "cuda"], gpus=lambda: 2)
        assert ("text" in cpu.tasks, "text-large" in cpu.tasks, cpu.seeds) == (True, False, 2)
        assert ("text" in gpu.tasks, "text-large" in gpu.tasks, gpu.seeds) == (False, True, 5)
        chosen = options("--tasks", "text-large", "--seeds", "1")
        assert (chosen.tasks, chosen.seeds) == (("text-large",), 1)


class TestRun:
    def run(
        self, given: argparse.Namespace, answer: Callable[[Mapping[str, Any]], list[Any]], clock: Any
    ) -> tuple[ConvergenceRun, list[StubTeam]]:
        teams: list[StubTeam] = []

        def start() -> StubTeam:
            teams.append(StubTeam(answer))
            return teams[-1]

        run = ConvergenceRun(given, start, Progress(1, stream=io.StringIO()), clock)
        run.run()
        return run, teams

    def test_algorithms_take_turns_within_a_seed(self) -> None:
        asked: list[tuple[str, str, int]] = []

        def answer(fields: Mapping[str, Any]) -> list[Any]:
            asked.append((fields["task"], fields["case"], fields["seed"]))
            return answers()

        given = options("--tasks", "digits,photographs", "--algorithms", "bytegrad,async", "--seeds", "2")
        run, teams = self.run(given, answer, lambda: 0.0)
        order = [BASELINE, "bytegrad", "async"]
        turned = [*order[1:], order[0]]
        tasks = ("digits", "photographs")
        assert asked == [(task, case, 1) for task in tasks for case in order] + [
            (task, case, 2) for task in tasks for case in turned
        ]
        assert (len(run.trainings), run.turns.errors) == (12, [])
        assert [team.closed for team in teams] == [[False]]

    def test_what_failed_is_left_out_and_the_rest_goes_on_with_other_ranks(self) -> None:
        def answer(fields: Mapping[str, Any]) -> list[Any]:
            if fields["case"] == "async":
                raise BenchError("rank 1 died")
            return answers()

        given = options("--tasks", "digits", "--algorithms", "async", "--seeds", "3")
        run, teams = self.run(given, answer, lambda: 0)
        assert run.turns.errors == ["async with digits: rank 1 died"]
        assert [one.case for one in run.trainings] == [BASELINE] * 3
        assert [team.closed for team in teams] == [[True], [False]]


class TestEarlier:
    """--earlier: trainings of another run."""

    @pytest.fixture
    def details(self, tmp_path: Path) -> Path:
        trainings = [training(case, seed, 0.1) for case in (BASELINE, "bytegrad") for seed in (1, 2)]
        trainings.append(training("async", 1, math.nan, curve_loss=[3.0, math.nan, math.nan]))
        path = tmp_path / "details.json"
        given = options("--details", str(path))
        vars(given).pop("earlier")
        report_of(trainings, {}, given, FACTS, Turns()).write(given, describe_machine())
        return path

    def test_what_is_there_is_not_trained_again(self, details: Path) -> None:
        given = options(
            "--tasks", "digits", "--algorithms", "bytegrad,async", "--seeds", "2", "--earlier", str(details)
        )
        assert plan_of(given, given.earlier) == {"digits": ["async"]}
        found = {(one.case, one.seed): one for one in given.earlier.trainings}
        assert found["bytegrad", 2].curve_bytes == [0.0, 5e6, 10e6]
        assert found["async", 1].test_loss == found["async", 1].curve_loss[-1] == math.inf
        newer = training("async", 1, 0.3)
        assert together(given.earlier.trainings, [newer])[-1] == newer
        assert len(together(given.earlier.trainings, [newer])) == 5

    def test_another_text_is_refused(self, details: Path) -> None:
        earlier = options("--earlier", str(details)).earlier
        now = training("async", 1, 0.3, source="digits 2", software=software_of(FACTS))
        report = report_of(together(earlier.trainings, [now]), {}, options(), FACTS, Turns())
        assert report.rows == []
        assert "digits: trainings that differ in source cannot be in one table: digits 1; digits 2" in report.errors[0]

    def test_other_software_is_refused(self, details: Path) -> None:
        earlier = options("--earlier", str(details)).earlier
        now = training("async", 1, 0.3, software=software_of({**FACTS, "torch": "2.11"}))
        assert report_of(together(earlier.trainings, [now]), {}, options(), FACTS, Turns()).rows == []

    def test_files_that_do_not_fit(self, details: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for words, says in (
            (["--earlier", str(details), "--nproc-per-node", "3"], "has trainings on 2 ranks, this run has 3"),
            (["--earlier", str(details.parent / "none.json")], "is not a file of --details"),
        ):
            with pytest.raises(SystemExit):
                options(*words)
            assert says in capsys.readouterr().err


class TestOutput:
    @pytest.fixture
    def trainings(self) -> list[TrainingResult]:
        found = [training(case, seed, 0.1 * seed) for seed in (1, 2) for case in (BASELINE, "bytegrad")]
        return [*found, training("async", 1, 0.2, 0.8, spread=0.01, replica_test_loss=0.4)]

    def test_the_report(self, trainings: list[TrainingResult]) -> None:
        sizes = {"digits": {"train_samples": 100, "test_samples": 20, "parameters": 5}}
        report = report_of(trainings, sizes, options(), FACTS, Turns())
        assert report.heading == "2 ranks on cpu, torch 2.13.0, 1 thread each"
        lines = report.table.splitlines()
        assert [line.split()[1] for line in lines[2:]] == [BASELINE, "bytegrad", "async"]
        assert lines[3].endswith("holds")
        assert "falls short: train loss +1e+02 %, test loss +1e+02 %, accuracy -10 points" in lines[4]
        assert "1.0e-02" in lines[4]
        assert report.lines[0] == (
            "digits: 100 samples to train with, 20 to test, 5 parameters, 100 steps of 60 samples; digits 1"
        )
        assert report.parameters["data"] == {"digits": "digits 1"}
        found = [one for one in report.figures if one.case["algorithm"] == "bytegrad"]
        (at_the_end,) = (one for one in found if one.metric == "loss" and "step" not in one.case)
        curve = [one for one in found if one.metric == "loss" and "step" in one.case]
        assert curve[-1].median == at_the_end.median
        assert [one.unit for one in found if one.metric == "accuracy"] == ["%"]
        settings = report.parameters["settings"]
        assert [(one["name"], one["options"]) for one in settings][1] == ("bytegrad", {"hierarchical": False})

    def test_the_figure(self, trainings: list[TrainingResult], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
        path = tmp_path / "convergence.png"
        write_figure(path, trainings, "title", "caption")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert len({style_of(case) for case in CASES}) == len(CASES)
