"""The steps of an algorithm that averages during its training, measured in whole cycles.

A cycle runs from the step in which parameters are given an average to the step in which they are given the next one. It
may have three steps or three hundred, and its steps are not alike: a few of them taken somewhere may show what a rank
does that is alone. So the measurement begins and ends with an average, the same two on all ranks, and what is
reported of each cycle is its mean step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from measure.core.wrapping import Averaging

# What measured cycles may take together, if there are several.
_SEVERAL_CYCLES_S = 8.0
# An average of half a gigabyte takes 9 s at 1 Gb/s with a round trip of 40 ms.
_LONGEST_CYCLE_S = 90.0


def largest_of_ranks(device: torch.device) -> Callable[[int], int]:
    """Of torch's default group, all of whose ranks call it; `device` is where it communicates."""

    def largest(value: int) -> int:
        values = torch.tensor(value, device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return int(values)

    return largest


class AveragingCycles:
    """Of one turn, on one rank; all ranks make the same calls.

    Args:
        averaging: of the algorithm.
        wanted: cycles to be measured; fewer where they are long, one at least.
        step: trains one step.
        largest: of the ranks' values; see largest_of_ranks.
    """

    def __init__(
        self,
        averaging: Averaging,
        wanted: int,
        step: Callable[[], object],
        largest: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._averaging = averaging
        self._wanted = wanted
        self._step = step
        self._largest = largest
        self._clock = clock
        self._ends: list[int] = []  # of the cycles: steps made until then, the first without any

    @property
    def number(self) -> int:
        """Of the measured cycles."""
        return len(self._ends) - 1

    def begin(self) -> None:
        """Train until an average has just been given on all ranks, and agree on the number of cycles.

        Raises:
            RuntimeError: none was given in time.
        """
        self._train_until(self._largest(self._averaging.count()) + 1)
        fitting = int(_SEVERAL_CYCLES_S / max(self._averaging.seconds(), 1e-3))
        self._wanted = -self._largest(-max(1, min(self._wanted, fitting)))

    def train(self, after_step: Callable[[], None]) -> None:
        """Train the cycles that are measured.

        Raises:
            RuntimeError: an average was not given in time.
        """
        first, steps = self._averaging.count(), 0

        def count() -> None:
            nonlocal steps
            steps += 1
            after_step()

        self._ends = [0]
        for number in range(1, self._wanted + 1):
            self._train_until(first + number, count)
            self._ends.append(steps)

    def mean_steps(self, step_seconds: Sequence[float]) -> list[float]:
        """Of each cycle, from the seconds of all steps of `train`."""
        assert len(step_seconds) == self._ends[-1]
        return [sum(step_seconds[begin:end]) / (end - begin) for begin, end in itertools.pairwise(self._ends)]

    def _train_until(self, averages: int, after_step: Callable[[], None] = lambda: None) -> None:
        deadline = self._clock() + _LONGEST_CYCLE_S
        while self._averaging.count() < averages:
            if self._clock() > deadline:
                raise RuntimeError(
                    f"no average was given to the parameters in {_LONGEST_CYCLE_S:g} s of training; the network is too"
                    " slow for this model: take a smaller one (--model, --length)"
                )
            self._step()
            after_step()
