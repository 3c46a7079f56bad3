"""Hits and misses, counted over a process and those that it forks or spawns."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

_logger = logging.getLogger("bagua")

_FIELDS = 5
# Each process counts in the row of its number, so that none waits for another. Two whose numbers share a row may lose
# counts to each other.
# Together below the 32 KiB from which torch copies with OpenMP's threads: a fork waits for them indefinitely.
_ROWS = 512


class CacheStatistics(NamedTuple):
    """What a cache did in this process and in its DataLoader workers.

    Attributes:
        hits: samples that came from the cache.
        misses: samples that were prepared.
        errors: operations of the store that failed, and stored samples that were damaged.
        bytes_read: size of the hits, as stored.
        bytes_written: size of the samples that were stored.
    """

    hits: int
    misses: int
    errors: int
    bytes_read: int
    bytes_written: int

    @property
    def hit_rate(self) -> float:
        """Hits as a part of all samples, 0 to 1; 0 if there were none."""
        return self.hits / max(1, self.hits + self.misses)


class SharedCounts:
    """The counts, in shared memory. Pickled for a spawned worker, it is the same memory."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_ROWS, _FIELDS, dtype=torch.int64, device="cpu")
        self._warned = torch.zeros(8, dtype=torch.uint8, device="cpu")
        try:
            for tensor in (self._counts, self._warned):
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _logger.warning(
                "The counters of a cache cannot be in shared memory (%s).\n"
                "statistics() counts this process alone, and each process warns for itself.\n"
                "Free space in /dev/shm, or raise its size (Docker: --shm-size).",
                error,
            )

    def add(self, hits: int = 0, misses: int = 0, errors: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
        """Counts on. Called under the lock of the loader."""
        values = [hits, misses, errors, bytes_read, bytes_written]
        self._counts[os.getpid() % _ROWS] += torch.tensor(values, dtype=torch.int64, device="cpu")

    def read(self) -> CacheStatistics:
        """The sums over the processes."""
        return CacheStatistics(*self._counts.sum(0).tolist())

    def is_first(self, kind: int) -> bool:
        """Whether nobody has warned of this kind before, of this process and its workers."""
        if self._warned[kind]:
            return False
        self._warned[kind] = 1
        return True
