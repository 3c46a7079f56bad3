"""Steps that are looked at: one in SAMPLE_EVERY. Samples on GPUs are read when the GPU has passed their events, so that
nothing waits on the host. Without torch; for one thread."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

SAMPLE_EVERY = 8
_MOST_UNREAD = 4  # a GPU that is further behind loses the oldest


class Sample(Protocol):
    @property
    def is_complete(self) -> bool:
        """The GPU has passed all of its events."""
        ...


_Sample = TypeVar("_Sample", bound=Sample)


def is_sampled(step: int) -> bool:
    """Of steps from 0; not the first, which compiles, allocates and connects."""
    return step % SAMPLE_EVERY == 1


class UnreadSamples(Generic[_Sample]):
    """Samples of steps that are over, in order."""

    def __init__(self) -> None:
        self._waiting: deque[_Sample] = deque(maxlen=_MOST_UNREAD)

    def add(self, sample: _Sample) -> None:
        self._waiting.append(sample)

    def take(self) -> Iterator[_Sample]:
        """Those that are complete, each once."""
        while self._waiting and self._waiting[0].is_complete:
            yield self._waiting.popleft()

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self) -> None:
        self._waiting.clear()


def median(values: Iterable[float]) -> float:
    """NaN where there is none."""
    known = list(values)
    return statistics.median(known) if known else float("nan")
