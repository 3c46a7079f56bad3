"""What the averaging loop adds to parameters, whatever they do meanwhile: turns are played in a fixed order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from support.averaging import DEADLINE_S, Rank
from torch import Tensor

from bagua.comm_ops.averaging_loop import Phase, Request


class Played:
    """Ranks without threads: turns are played step by step, with training at every place where it may happen."""

    def __init__(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float64) -> None:
        self.ranks = [Rank(self, one, dtype=dtype) for one in values]
        self.is_registered = True
        for rank in self.ranks:
            for part, tensors, step in zip(rank.loop.parts, rank.parameters, rank.steps, strict=True):
                rank.loop._memory.copy(part, tensors, step)
                part.is_copied = False

    def set_phase(self, phase: Phase) -> None:
        for rank in self.ranks:
            rank.loop._phase = phase

    def exchange(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """All ranks at once, by the arithmetic of each; `meanwhile` comes in the middle."""
        for rank in self.ranks:
            rank.loop._phase = Phase.EXCHANGE
        parts = range(len(self.ranks[0].loop.parts))
        sums = {
            part: torch.stack([rank.loop.parts[part].averages[0].contribution for rank in self.ranks]).sum(dim=0)
            for part in parts
        }
        waiting = [meanwhile]
        for rank in self.ranks:
            for index, part in enumerate(rank.loop.parts):
                average = part.averages[0]
                scratch = torch.empty_like(average.contribution)

                def add_up(mean: Tensor, index: int = index) -> None:
                    mean.copy_(sums[index])
                    if waiting:
                        waiting.pop()()

                average.exchange(add_up, len(self.ranks), part.is_owed, scratch)
        for rank in self.ranks:
            for part in rank.loop.parts:
                part.is_copied, part.is_owed = False, True
            rank.loop._phase = Phase.PAUSE


def test_staleness_is_the_steps_between_copy_and_addition() -> None:
    played = Played([(0.0,), (8.0,)])
    played.set_phase(Phase.COPY)
    first, second = played.ranks
    assert [first.step(0.0), second.step(0.0)] == [None, None]  # copied
    assert first.step(0.0) is None  # copied again: the older one is replaced
    during: list[int | None] = []
    played.exchange(lambda: during.extend(first.step(0.0) for _ in range(3)))
    assert during == [None] * 3
    assert [first.step(0.0), second.step(0.0)] == [4, 1]
    assert [first.step(0.0), second.step(0.0)] == [None, None]
    assert (first.value(), second.value()) == (4.0, 4.0)


def test_training_goes_on_while_the_mean_is_made() -> None:
    """x += mean - copy, and not x = mean."""
    during: list[int | None] = []
    played = Played([(0.0,), (8.0,)])
    first, second = played.ranks
    played.set_phase(Phase.COPY)
    first.step(2.0)
    second.step(0.0)
    played.exchange(lambda: during.append(first.step(100.0)))
    first.step(1000.0)
    second.step(0.0)
    assert (first.value(), second.value()) == (5.0 + 1100.0, 5.0)


@pytest.mark.parametrize("seed", range(100))
def test_nothing_is_lost_and_nothing_is_counted_twice(seed: int) -> None:
    """Whatever the order of steps, safe points and exchanges: the sum of parameters and what they are owed is that of
    the beginning and all steps, for each of two parts that are copied and given apart."""
    draw = random.Random(seed)
    values = [(float(draw.randrange(100)), float(draw.randrange(100))) for _ in range(draw.choice((1, 2, 4)))]
    played = Played(values)
    expected = [sum(one[part] for one in values) for part in range(2)]

    def train() -> None:
        for rank in played.ranks:
            for part in range(2):
                for _ in range(draw.choice((0, 0, 1, 3))):
                    amount = float(draw.randrange(-9, 9))
                    expected[part] += amount
                    rank.step(amount, part)

    for _ in range(30):
        played.set_phase(draw.choice((Phase.PAUSE, Phase.COPY)))
        train()
        if draw.random() < 0.6:
            played.exchange(train)
            train()
        for part in range(2):
            total = 0.0
            for rank in played.ranks:
                one = rank.loop.parts[part]
                owed = one.averages[0]._differences[1].item() if one.is_owed else 0.0
                total += rank.value(part) + owed
            assert total == pytest.approx(expected[part], abs=1e-9)
    # Ranks that rest meet at the mean.
    played.set_phase(Phase.COPY)
    for rank in played.ranks:
        for part in range(2):
            rank.safe_point(part)
    played.exchange()
    for part in range(2):
        for rank in played.ranks:
            rank.safe_point(part)
            assert rank.value(part) == pytest.approx(expected[part] / len(values), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_short_dtypes_are_averaged_in_float32(dtype: torch.dtype) -> None:
    # 2**-9 is half a unit in the last place of float16 at 1 and less of bfloat16's: each sum would lose it.
    values = [1.0, 1.0 + 2**-7, 1.0, 1.0 + 2**-7]
    played = Played([(value,) for value in values], dtype)
    played.set_phase(Phase.COPY)
    for rank in played.ranks:
        rank.safe_point()
        found = rank.loop.parts[0].averages[0].contribution.dtype
        assert found is (torch.float32 if dtype.itemsize == 2 else dtype)
    played.exchange()
    mean = torch.tensor(values).mean().to(dtype)
    for rank in played.ranks:
        rank.safe_point()
        assert all(torch.equal(tensor, mean.expand(tensor.shape)) for tensor in rank.parameters[0][0])


def test_a_wish_that_was_told_does_not_shorten_the_pause() -> None:
    played = Played([(0.0,)])
    loop = played.ranks[0].loop
    loop.leave()
    start = time.monotonic()
    loop._pause(0.05, Request.LEAVE)
    assert time.monotonic() - start >= 0.05
    loop._pause(DEADLINE_S, Request.RUN)  # returns at once
    assert time.monotonic() - start < DEADLINE_S
