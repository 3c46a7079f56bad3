"""What takes a turn, what a turn tells, and one measured row: a backend at one size. algbw and busbw are as nccl-tests
defines them (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import math
import statistics
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


def busbw_factor(collective: str, ranks: int) -> float:
    """busbw / algbw: what the slowest link has to carry per byte of the operation, so that rank counts compare."""
    crossings = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}.get(collective)
    return 1.0 if crossings is None else crossings * (ranks - 1) / ranks


@dataclass(frozen=True)
class Measurement:
    """What the table and the exports show of one backend at one size: a sample a repetition."""

    backend: str
    collective: str
    bytes: int
    ranks: int
    samples: Sequence[Sample]
    cpu_from_bytes: int = 0  # CPU time is told of these and larger
    share_of_raw: float | None = None  # bytes on all links per second / the best raw TCP rate
    verified: bool | None = None  # None: not checked
    note: str = ""

    def __post_init__(self) -> None:
        if min(sample.seconds for sample in self.samples) <= 0:
            raise ValueError(f"{self.backend} at {self.bytes} B took no time; a time must be positive")

    def _times_us(self) -> list[float]:
        """Of (elapsed / iterations)."""
        return [sample.seconds * 1e6 for sample in self.samples]

    @property
    def repetitions(self) -> int:
        return len(self.samples)

    @property
    def time_us(self) -> float:
        return statistics.median(self._times_us())

    @property
    def time_min_us(self) -> float:
        return min(self._times_us())

    @property
    def time_max_us(self) -> float:
        return max(self._times_us())

    @property
    def algbw_gb_s(self) -> float:
        """GB/s = 10^9 bytes per second."""
        return self.bytes / self.time_us / 1e3

    @property
    def busbw_gb_s(self) -> float:
        return self.algbw_gb_s * busbw_factor(self.collective, self.ranks)

    @property
    def busbw_range_gb_s(self) -> tuple[float, float]:
        """busbw of the slowest and of the fastest repetition."""
        scale = self.busbw_gb_s * self.time_us
        return scale / self.time_max_us, scale / self.time_min_us

    def latency_us(self, percent: float) -> float | None:
        """Over the single iterations of every repetition; None of large sizes."""
        single = [value for sample in self.samples for value in sample.iteration_seconds]
        return percentile(single, percent) * 1e6 if single and self.bytes <= LATENCY_LIMIT_BYTES else None

    @property
    def cpu_s_per_gb(self) -> float | None:
        """CPU seconds of all ranks per 10^9 bytes that crossed a connection."""
        if self.bytes < self.cpu_from_bytes:
            return None
        return statistics.median(sample.cpu_s_per_gb for sample in self.samples)
