"""Which steps of an algorithm that averages during its training are measured, and what is said of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch, which is what trains")

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from measure.core.averaging_cycles import AveragingCycles
from measure.core.wrapping import Averaging


class Training:
    """Its steps take a second, and it is given averages in the steps that it is told."""

    def __init__(self, averaged_in: set[int], average_s: float = 1.0) -> None:
        self._averaged_in = averaged_in
        self.steps = self.averages = 0
        self.averaging = Averaging(lambda: self.averages, lambda: average_s)

    def step(self) -> None:
        self.steps += 1
        self.averages += self.steps in self._averaged_in

    def clock(self) -> float:
        return float(self.steps)


def cycles_of(training: Training, wanted: int, other_ranks: list[int] | None = None) -> AveragingCycles:
    """`other_ranks` is the value of the rank beside this one, question by question."""
    others = list(other_ranks or [])

    def largest(value: int) -> int:
        return max(value, others.pop(0)) if others else value

    return AveragingCycles(training.averaging, wanted, training.step, largest, training.clock)


def test_measured_steps_begin_and_end_with_an_average() -> None:
    training = Training({2, 5, 9, 11, 20})
    training.step()
    cycles = cycles_of(training, 3)
    cycles.begin()
    assert training.steps == 2
    marks: list[int] = []
    cycles.train(lambda: marks.append(training.steps))
    assert marks == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert cycles.number == 3
    assert cycles.mean_steps([3, 6, 9, 1, 1, 1, 5, 2, 4]) == [6, 2, 3]


def test_the_average_during_which_the_warm_up_ended_is_not_measured() -> None:
    training = Training({1, 2, 6, 8})
    training.step()
    cycles = cycles_of(training, 1, other_ranks=[2])
    cycles.begin()
    assert training.averages == 3, "the other rank had two: both begin with the third"
    cycles.train(lambda: None)
    assert training.steps == 8


@pytest.mark.parametrize(("average_s", "other", "measured"), [(0.5, -4, 4), (0.0, -4, 4), (2.5, -4, 3), (60, -4, 1)])
def test_long_averages_make_fewer_cycles(average_s: float, other: int, measured: int) -> None:
    cycles = cycles_of(training := Training(set(range(1, 100)), average_s), 4, other_ranks=[0, other])
    cycles.begin()
    cycles.train(lambda: None)
    assert cycles.number == measured == training.steps - 1


def test_the_rank_that_wants_the_fewest_cycles_is_followed() -> None:
    cycles = cycles_of(Training(set(range(1, 100))), 4, other_ranks=[0, -2])
    cycles.begin()
    cycles.train(lambda: None)
    assert cycles.number == 2


NOTHING_CAME = r"no average was given to the parameters in 90 s of training.*--model"


def test_an_average_that_does_not_come_is_an_error() -> None:
    cycles = cycles_of(training := Training(set()), 2)
    with pytest.raises(RuntimeError, match=NOTHING_CAME):
        cycles.begin()
    assert training.steps < 100


def test_a_second_average_that_does_not_come_is_an_error() -> None:
    cycles = cycles_of(training := Training({1}), 2)
    cycles.begin()
    with pytest.raises(RuntimeError, match=NOTHING_CAME):
        cycles.train(lambda: None)
    assert training.steps < 100
