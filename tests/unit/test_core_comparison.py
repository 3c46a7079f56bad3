"""What `measure core` makes of its turns: ratios and faults. Real ranks: tests/distributed/test_core_comparison.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.catalogue import REFERENCE
from measure.core.step_statistics import TurnResult, faults_of, rows_of, turn_result

MIB = 1 << 20


def turn(algorithm: str, number: int, steps_ms: list[float], **changes: Any) -> TurnResult:
    fields: dict[str, Any] = {
        "model": "mlp",
        "algorithm": algorithm,
        "round": number,
        "step_seconds": [ms / 1e3 for ms in steps_ms],
        "steps": len(steps_ms),
        "losses": [1.0],
        "parameters": 10,
        "gradients": 2,
        "peak_bytes": None,
        "steps_peak_bytes": None,
        "own_cores": 1.0,
        "machine_busy": None,
        "averagings": None,
        "replicas_agree": True,
        "largest_difference": 0.0,
        "relative_difference": 0.0,
        "kept": None,
    }
    return TurnResult(**{**fields, **changes})


def answer(seconds: list[float], **changes: Any) -> dict[str, Any]:
    fields = {
        "event": "turn",
        "step_seconds": seconds,
        "steps": len(seconds),
        "losses": [2.0],
        "parameters": 10,
        "gradients": 2,
        "peak_bytes": 3 * MIB,
        "steps_peak_bytes": MIB,
        "own_cores": 0.5,
        "machine_busy": 0.75,
        "averagings": None,
        "fingerprint": [1, 2],
        "difference": None,
        "kept": None,
    }
    return {**fields, **changes}


class TestStatistics:
    def test_a_step_is_as_long_as_on_its_slowest_rank(self) -> None:
        found = turn_result("mlp", REFERENCE, 0, [answer([1, 5, 2]), answer([3, 4, 2], peak_bytes=4 * MIB)])
        assert found.step_seconds == [3, 5, 2]
        assert found.peak_bytes == 4 * MIB
        assert (found.own_cores, found.machine_busy) == (0.5, 0.75)
        assert found.replicas_agree

    def test_ratios_are_taken_within_a_round(self) -> None:
        """The machine became three times slower in round 1, which is nobody's merit."""
        turns = [turn(REFERENCE, 0, [10, 10]), turn("with-bagua", 0, [8, 8])]
        turns += [turn("with-bagua", 1, [24, 24]), turn(REFERENCE, 1, [30, 30]), turn("with-bagua", 2, [1])]
        ddp, ours = rows_of(turns)
        assert ddp.speed_up is None
        assert ours.speed_up is not None
        assert (ours.speed_up.median, ours.speed_up.low, ours.speed_up.high) == pytest.approx((1.25, 1.25, 1.25))
        assert ours.rounds == 3
        assert ours.step_ms == pytest.approx(8)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"replicas_agree": False}, "the ranks ended with different parameters"),
            ({"losses": [1.0, math.nan]}, "the loss became nan"),
            ({"relative_difference": 0.2}, "differ from torch-ddp's by 0.2 of the way from the start; allowed 0.1"),
            ({"relative_difference": math.inf}, "differ from torch-ddp's by inf"),
            ({"relative_difference": math.nan}, "differ from torch-ddp's by nan"),
        ],
    )
    def test_another_training_is_a_fault(self, changes: Mapping[str, Any], says: str) -> None:
        (fault,) = faults_of([turn(REFERENCE, 0, [1]), turn("bagua-ddp", 0, [1], **changes)], 0.1)
        assert "bagua-ddp with mlp" in fault
        assert says in fault

    @pytest.mark.parametrize(
        ("algorithm", "agree", "difference", "faults"),
        [
            ("bytegrad", True, 0.5, 0),
            ("bytegrad", False, 0.5, 1),
            ("async", False, 0.5, 0),
            ("with-bagua", False, 0.5, 2),
        ],
    )
    def test_algorithms_are_held_to_what_they_promise(
        self, algorithm: str, agree: bool, difference: float, faults: int
    ) -> None:
        turns = [turn(REFERENCE, 0, [1])]
        turns.append(turn(algorithm, 0, [1], replicas_agree=agree, relative_difference=difference))
        assert len(faults_of(turns, 0.1)) == faults

    def test_what_rounds_of_ddp_differ_by_is_allowed_to_others_thrice(self) -> None:
        turns = [turn(REFERENCE, 0, [1], relative_difference=None), turn(REFERENCE, 1, [1], relative_difference=0.1)]
        assert faults_of([*turns, turn("bagua-ddp", 0, [1], relative_difference=0.29)], 0.1) == []
        assert len(faults_of([*turns, turn("bagua-ddp", 0, [1], relative_difference=0.31)], 0.1)) == 1
