"""Steps that are looked at: one in SAMPLE_EVERY. Samples on GPUs are read when the GPU has passed their events, so that
nothing waits on the host. Without torch; for one thread."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

SAMPLE_EVERY = 8
_MOST_UNREAD = 4  # a GPU that is further behind loses the oldest
_BLOCKS = 5


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
    """Samples of steps that are over, in order.

    Args:
        most: of them; then the oldest are lost.
    """

    def __init__(self, most: int = _MOST_UNREAD) -> None:
        self._waiting: deque[_Sample] = deque(maxlen=most)

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


def typical(values: Sequence[float]) -> float:
    """The median of the means of _BLOCKS parts, each of consecutive values; NaN where there is none. A slow step among
    others counts for nothing, as with a median; but many that are slow now and then do, as those of a process are whose
    share of a core is used up before each of its scheduler's periods ends."""
    size = max(1, len(values) // _BLOCKS)
    return median(statistics.fmean(values[end - size : end]) for end in range(len(values), size - 1, -size))
