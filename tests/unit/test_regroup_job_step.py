"""A step of the job: when it is over, and what of it is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bagua.regroup.job_step import JobStep, Turn


class _Model:
    def __init__(self, name: str, optimizers: int) -> None:
        self.name = name
        self.optimizers = [torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1) for _ in range(optimizers)]

    def synchronizes(self, _: object) -> bool:
        return False


def _step(*optimizers: int) -> tuple[JobStep, Sequence[Any], Sequence[Turn]]:
    step = JobStep()
    models: Sequence[Any] = [_Model(f"model {number}", count) for number, count in enumerate(optimizers)]
    return step, models, [step.add(one) for one in models]


def test_it_is_over_when_each_optimizer_has_stepped_and_counts_from_the_first_on() -> None:
    step, (first, second), turns = _step(2, 1)
    for number in range(3):
        assert step.begin_pass(turns[0])
        assert [step.end(one, True) for one in first.optimizers] == [False, False]
        assert (step.count, len(step.made)) == (number, 2)
        assert step.begin_pass(turns[1])
        assert step.end(second.optimizers[0], True)
        assert (step.count, len(step.made), step.is_between) == (number + 1, 0, True)


def test_the_rest_of_one_that_is_dropped_does_nothing() -> None:
    step, (first, second), turns = _step(1, 1)
    # In the turn of the first model: neither of them makes it.
    assert step.begin_pass(turns[0])
    step.drop()
    step.settle(0)
    assert ([turn.is_dropped for turn in turns], step.is_left_out, step.is_between) == ([True, True], True, False)
    assert not step.end(first.optimizers[0], False)
    assert not step.begin_pass(turns[1])
    assert step.end(second.optimizers[0], False)
    assert (step.count, step.is_dropped, step.is_between) == (0, False, True)
    # In the turn of the second: the first one has made it, and it counts.
    assert step.begin_pass(turns[0])
    assert not step.end(first.optimizers[0], True)
    assert step.begin_pass(turns[1])
    step.drop()
    step.settle(1)
    assert ([turn.is_dropped for turn in turns], step.is_left_out) == ([False, True], False)
    # A program that leaves the rest of it out begins the next one.
    assert step.begin_pass(turns[0])
    assert (step.count, step.is_dropped) == (1, False)


def test_a_model_that_is_gone_is_not_waited_for() -> None:
    step, (first, second), turns = _step(1, 1)
    assert step.begin_pass(turns[0])
    step.remove(second)
    assert step.end(first.optimizers[0], True)
    assert step.count == 1
    assert step.participants == [first]
    again: Any = _Model("again", 1)
    step.add(again)
    assert step.participants == [first, again]
    late: Any = _Model("late", 1)
    with pytest.raises(NotImplementedError, match="late is wrapped after training has begun"):
        step.add(late)
