"""`measure networks` without ranks: the best of NCCL's own settings, ratios, losses. Real ranks are in
tests/net/test_bench_nccl_training.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.step_statistics import TurnResult
from measure.networks.comparison import Sample, best_tuned, row_of, training_faults

from bagua.net.bench.turns import Turns

DEFAULT, WIDE, THREADS, OURS = "NCCL default", "NCCL t2s4", "NCCL t4s1", "bagua-net"


def sample(variant: str, number: int, seconds: float = 0.1, losses: tuple[float, ...] = (2.0, 1.0)) -> Sample:
    fields: dict[str, Any] = dict.fromkeys(TurnResult.__dataclass_fields__)
    fields |= {"losses": list(losses), "replicas_agree": True}
    return Sample("25G", "mlp", variant, number, seconds, TurnResult(**fields))


def turns_of(*samples: Sample) -> Turns[Sample]:
    found: Turns[Sample] = Turns()
    for one in samples:
        found.samples.setdefault((one.case, one.variant), {})[one.round] = one
    return found


def test_ratios_are_paired_by_round_and_the_best_setting_is_that_of_the_least_median() -> None:
    samples = []
    for number, (default, wide, threads, ours) in enumerate([(0.4, 0.2, 0.3, 0.1), (0.4, 0.24, 0.1, 0.12)]):
        times = {DEFAULT: default, WIDE: wide, THREADS: threads, OURS: ours, "bytegrad": ours / 2}
        samples += [sample(variant, number, seconds) for variant, seconds in times.items()]
    # Medians over both rounds: 0.22 of WIDE, 0.2 of THREADS.
    row = row_of(turns_of(*samples), "25G", "mlp", [DEFAULT, WIDE, THREADS], OURS, ["bytegrad"])
    assert row is not None
    assert row.best_name == THREADS
    assert row.over_best is not None
    assert (row.over_default.low, row.over_default.high) == pytest.approx((0.4 / 0.12, 4.0))
    assert (row.over_best.low, row.over_best.high) == pytest.approx((0.1 / 0.12, 3.0))
    assert row.algorithms["bytegrad"][1].median == pytest.approx(2.0)
    failed = [sample(DEFAULT, 0), sample(DEFAULT, 1), sample(THREADS, 0, 0.01)]
    assert best_tuned(turns_of(*failed), "mlp", [DEFAULT, THREADS]) == DEFAULT, "one that failed on the way is not it"


def test_losses_of_ddp_must_agree_and_those_of_algorithms_be_finite() -> None:
    same = [sample(DEFAULT, 0), sample(OURS, 0)]
    other = sample(OURS, 1, losses=(2.0, 1.0001))

    def faults(*samples: Sample, tolerance: float = 0.0) -> list[str]:
        return training_faults(turns_of(*samples), "mlp", DEFAULT, ["bytegrad"], tolerance)

    assert faults(*same) == faults(*same, other, tolerance=1e-3) == []
    (fault,) = faults(*same, other)
    assert "bagua-net" in fault
    assert "by 5e-05" in fault
    assert faults(*same, other, sample(DEFAULT, 1, losses=(2.0, 1.1))) == [], "what rounds of the default differ by"
    assert len(faults(*same, sample(OURS, 1, losses=(2.0, math.nan)), tolerance=0.1)) == 1
    assert faults(*same, sample("bytegrad", 0, losses=(2.0, 1.5))) == []
    assert len(faults(*same, sample("bytegrad", 0, losses=(2.0, math.nan)))) == 1
