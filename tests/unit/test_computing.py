"""Which rank is slower at computing than another one, and which is not, though others wait for it."""

from __future__ import annotations

import math

import pytest

from bagua.engine.step_statistics import KEPT, PassRecorder
from bagua.job.computing import LEAST_STEPS, Computing, slower_by
from bagua.tuning.sampled_steps import median

STEPS = 300


def _measured(step_s: list[float], waited_s: list[float]) -> Computing:
    now = 0.0
    recorder = PassRecorder(lambda: now)
    for seconds, waited in zip(step_s, waited_s, strict=True):
        now += seconds + waited
        recorder.end_pass(waited, None)
    count, step, exposed = recorder.latest(KEPT, median)
    return Computing(count, step - exposed)


MINE = _measured([1.0] * STEPS, [0.8] * STEPS)


def test_a_rank_that_computes_for_longer_for_some_hundred_steps_is_slower() -> None:
    assert slower_by(_measured([1.8] * STEPS, [0.0] * STEPS), MINE) == pytest.approx(1.8)
    assert slower_by(MINE, _measured([1.8] * STEPS, [0.0] * STEPS)) is None


@pytest.mark.parametrize(
    ("step_s", "waited_s"),
    [
        ([1.0] * 150 + [300.0] + [1.0] * 149, [0.8] * STEPS),  # a checkpoint
        ([200.0, 90.0] + [1.0] * (STEPS - 2), [0.8] * STEPS),  # it has compiled
        ([1.0] * STEPS, [30.0] * STEPS),  # a slow network: all wait
        ([1.04, 0.97] * (STEPS // 2), [0.8] * STEPS),  # noise
        ([50.0 if step % 20 == 19 else 1.0 for step in range(STEPS)], [0.8] * STEPS),  # it evaluates alone
        ([5.0] * 150, [0.0] * 150),  # for a while
        ([], []),
    ],
    ids=["checkpoint", "compile", "network", "noise", "evaluation", "shortly", "unknown"],
)
def test_others_are_innocent(step_s: list[float], waited_s: list[float]) -> None:
    assert slower_by(_measured(step_s, waited_s), MINE) is None


def test_nothing_is_compared_with_what_is_not_known() -> None:
    slow = Computing(LEAST_STEPS, 2.0)
    assert slower_by(slow, Computing()) is None
    assert slower_by(slow, Computing(LEAST_STEPS, math.nan)) is None
    assert slower_by(Computing(LEAST_STEPS, math.nan), MINE) is None
