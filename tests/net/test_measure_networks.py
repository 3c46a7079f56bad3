"""`measure networks` without ranks: losses, the best of NCCL's own settings, ratios. Real ranks are in
tests/net/test_bench_nccl_training.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.ranks import bagua_net_by_activation
from measure.core.step_statistics import TurnResult
from measure.networks import (
    DEFAULT_TOLERANCE,
    backends_of,
    best_tuned,
    loss_faults,
    parse_options,
    relative_difference,
    rows_of,
)

from bagua.net.bench.nccl_ab.backend import Backend, hand_tuned, own_transport
from bagua.net.bench.turns import Turns

DEFAULT, OURS = own_transport(), bagua_net_by_activation()
TUNED = [hand_tuned("2x4"), hand_tuned("4x1")]


def turn(backend: Backend, number: int, step_s: float = 0.1, losses: tuple[float, ...] = (2.0, 1.0)) -> TurnResult:
    fields: dict[str, Any] = dict.fromkeys(TurnResult.__dataclass_fields__)
    fields |= {"model": "mlp", "algorithm": backend.name, "round": number, "replicas_agree": True}
    return TurnResult(**{**fields, "step_seconds": [step_s] * 5, "losses": list(losses)})


def turns_of(*turns: TurnResult) -> Turns[TurnResult]:
    found: Turns[TurnResult] = Turns()
    for one in turns:
        found.samples.setdefault(("mlp", one.algorithm), {})[one.round] = one
    return found


def faults(*turns: TurnResult, own_spread: float = 0.0, tolerance: float = 0.0) -> list[str]:
    return loss_faults(rows_of(turns_of(*turns), "mlp", [DEFAULT, OURS], 64), own_spread, tolerance)


def test_one_different_loss_of_one_round_is_a_fault_that_says_by_how_much() -> None:
    same = [turn(DEFAULT, 0, losses=(2.0, 1.0, 0.5)), turn(OURS, 0, losses=(2.0, 1.0, 0.5))]
    other = turn(OURS, 1, losses=(2.0, 1.0, 0.5001))
    (fault,) = faults(*same, other)
    assert "bagua-net" in fault
    assert "by 5e-05" in fault
    assert faults(*same) == faults(*same, other, tolerance=1e-3) == []


def test_the_spread_of_the_default_is_allowed_to_us_too() -> None:
    turns = [turn(DEFAULT, 0), turn(DEFAULT, 1, losses=(2.0, 1.1)), turn(OURS, 0, losses=(2.0, 1.05))]
    assert faults(*turns, own_spread=0.05) == []
    assert len(faults(*turns, own_spread=0.02)) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_loss_that_is_not_a_number_is_never_equal(place: int) -> None:
    ours = [turn(OURS, number, losses=(2.0, math.nan) if number == place else (2.0, 1.0)) for number in (0, 1)]
    assert len(faults(turn(DEFAULT, 0), *ours, tolerance=0.02)) == 1
    assert relative_difference([math.nan], [math.nan]) == math.inf


def test_best_tuned_is_that_of_the_least_median_and_ratios_are_paired_by_round() -> None:
    turns = []
    for number, (default, wide, threads, ours) in enumerate([(0.4, 0.2, 0.3, 0.1), (0.4, 0.24, 0.1, 0.12)]):
        turns += [turn(DEFAULT, number, default), turn(TUNED[0], number, wide)]
        turns += [turn(TUNED[1], number, threads), turn(OURS, number, ours)]
    # Medians over both rounds: 0.22 of t2s4, 0.2 of t4s1.
    backends = [DEFAULT, *TUNED, OURS]
    assert best_tuned(turns_of(*turns), "mlp", backends) == "NCCL t4s1"
    *_, ours = rows_of(turns_of(*turns), "mlp", backends, 64)
    assert ours.over_default is not None
    assert ours.over_best is not None
    assert (ours.over_default.low, ours.over_default.high) == pytest.approx((0.4 / 0.12, 4.0))
    assert (ours.over_best.low, ours.over_best.high) == pytest.approx((0.1 / 0.12, 3.0))
    failed = [turn(DEFAULT, 0), turn(DEFAULT, 1), turn(TUNED[1], 0, 0.01), turn(OURS, 0)]
    assert best_tuned(turns_of(*failed), "mlp", backends) == "NCCL default", "one that failed on the way is not it"
    assert best_tuned(turns_of(turn(OURS, 0)), "mlp", [DEFAULT, OURS]) is None


def test_two_ranks_have_to_agree_exactly_and_more_within_rounding() -> None:
    assert parse_options(["--device", "cpu"]).tolerance == 0.0
    assert parse_options(["--device", "cpu", "--nproc-per-node", "4"]).tolerance == DEFAULT_TOLERANCE


def test_ours_is_switched_on_by_the_variable_alone() -> None:
    *_, ours = backends_of(parse_options(["--device", "cpu"]))
    assert (ours.settings, ours.network) == ({"ENABLE_BAGUA_NET": "1"}, "BaguaNet")
    assert len(backends_of(parse_options(["--device", "cpu", "--tuned", "best"]))) == 10
