"""What `measure convergence` makes of its trainings: differences and verdicts, and that it trains
with every algorithm and codec. Real ranks: tests/distributed/test_convergence.py."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.convergence import statistics
from measure.convergence.catalogue import BASELINE, CASES, DEFAULT_CODEC, ERROR_FEEDBACK, FSDP
from measure.convergence.statistics import (
    HOLDS,
    Difference,
    TrainingResult,
    difference_of,
    faults_of,
    reached,
    relative_difference_of,
    rows_of,
    verdict,
)

from bagua.codecs import codec_names
from bagua.torch_api.algorithms import GlobalAlgorithmRegistry

POINTS = [0, 50, 100]


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


def test_differences_are_paired() -> None:
    """Seeds differ more than algorithms do, and their spread is not the error of the difference."""
    gap = difference_of([11.0, 21.0, 31.5], [10.0, 20.0, 30.0])
    assert gap.mean == pytest.approx(3.5 / 3)
    assert gap.error == pytest.approx(0.5 / 3)
    relative = relative_difference_of([11.0, 21.0], [10.0, 20.0])
    assert (relative.mean, relative.error) == pytest.approx((100 / 15, 0.0))
    assert difference_of([1.0], [0.5]) == Difference(0.5, None)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_no_number_is_close_to_nothing(broken: float) -> None:
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
def test_verdicts(train: float, test: float, accuracy: float | None, says: str) -> None:
    points = None if accuracy is None else Difference(accuracy, 0.1)
    assert verdict(Difference(train, 0.1), Difference(test, None), points) == says


def test_replicas_that_differ_are_a_fault_of_some() -> None:
    apart = [training(case, 2, 0.1, spread=1e-9) for case in ("bytegrad", "async", "decentralized", "qadam")]
    assert [fault.split(":")[0] for fault in faults_of(apart)] == [
        "bytegrad with digits, seed 2",
        "qadam with digits, seed 2",
    ]
    assert faults_of([training("bytegrad", 1, 0.1, spread=math.nan)])


def test_the_same_loss_is_reached_between_two_evaluations() -> None:
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


@pytest.mark.parametrize("changes", [{"source": "digits 2"}, {"software": "torch 3"}, {"steps": 7}])
def test_trainings_that_are_not_comparable(changes: dict[str, Any]) -> None:
    trainings = [training(BASELINE, 1, 0.2), training("bytegrad", 1, 0.2)]
    other_task = training(BASELINE, 1, 0.2, task="text", source="Python 3.11.7")
    assert statistics.mixed_trainings([*trainings, other_task]) == []
    (found,) = statistics.mixed_trainings([*trainings, training("async", 1, 0.2, **changes)])
    assert found.startswith(f"digits: trainings that differ in {next(iter(changes))} cannot be in one table: ")
    assert str(next(iter(changes.values()))) in found


def test_every_algorithm_is_compared_and_every_codec() -> None:
    assert {case.algorithm for case in CASES.values()} == {*GlobalAlgorithmRegistry, ERROR_FEEDBACK, FSDP}
    for algorithm in ("bytegrad", ERROR_FEEDBACK, "low_precision_decentralized"):
        mine = [case for case in CASES.values() if case.algorithm == algorithm]
        assert [case.options.get("codec", DEFAULT_CODEC) for case in mine] == codec_names()
    for feedback in (False, True):
        mine = [
            case
            for case in CASES.values()
            if "gradients" in case.options
            and "weights" not in case.options
            and case.options.get("error_feedback", False) == feedback
        ]
        assert [case.options["gradients"] for case in mine] == codec_names()
