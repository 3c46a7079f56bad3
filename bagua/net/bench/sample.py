"""What takes a turn, and what a turn tells: an operation at one size, and one backend's time for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.net.bench.sizes import format_size

# p50 and p99 are shown up to this size; above it a time is bandwidth, not latency.
LATENCY_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Case:
    """One operation at one size: what one group of rows compares."""

    collective: str
    bytes: int

    @property
    def wants_latency(self) -> bool:
        """Small enough for percentiles of single iterations."""
        return self.bytes <= LATENCY_LIMIT_BYTES

    def __str__(self) -> str:
        return f"{self.collective} of {format_size(self.bytes)}"


@dataclass(frozen=True)
class Sample:
    """One turn of one backend. Of each time the slowest rank's: an operation has ended when it has ended everywhere."""

    iterations: int
    seconds: float  # elapsed / iterations
    iteration_seconds: tuple[float, ...]  # of single iterations; empty where they were not timed one by one
    cpu_seconds: float  # of all ranks, all iterations
    moved_bytes: int  # payload that crossed a connection, all connections, all iterations

    @property
    def typical_seconds(self) -> float:
        """p50 of the iterations, where they were timed one by one."""
        return percentile(self.iteration_seconds, 50) if self.iteration_seconds else self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_seconds / (self.moved_bytes / 1e9)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that was really measured, never an interpolation."""
    if not samples:
        raise ValueError("no samples to take a percentile of")
    if not 0 < percent <= 100:
        raise ValueError(f"percentile {percent} is outside (0, 100]")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
