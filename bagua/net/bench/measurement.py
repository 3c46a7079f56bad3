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


GIGABYTE = 1e9

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "send_recv",
    "one_way",
)


def busbw_factor(collective: str, ranks: int) -> float:
    """busbw / algbw: what the slowest link has to carry per byte of the operation, so that rank counts compare.

    `one_way` is raw TCP: the bytes cross one link once.
    """
    if ranks < 1:
        raise ValueError(f"a collective of {ranks} ranks does not exist; at least 1 rank")
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    if collective in ("broadcast", "reduce", "send_recv", "one_way"):
        return 1.0
    raise ValueError(f"unknown collective {collective!r}; known: {', '.join(COLLECTIVES)}")


@dataclass(frozen=True)
class Measurement:
    """What the table and the exports show of one backend at one size."""

    backend: str
    collective: str
    bytes: int
    iterations: int  # of one repetition
    time_us: float  # median over repetitions of (elapsed / iterations)
    time_min_us: float
    time_max_us: float
    repetitions: int
    algbw_gb_s: float  # GB/s = 10^9 bytes per second
    busbw_gb_s: float
    latency_p50_us: float | None = None  # over the single iterations of every repetition
    latency_p99_us: float | None = None
    cpu_s_per_gb: float | None = None  # CPU seconds of all ranks per 10^9 bytes that crossed a connection
    share_of_raw: float | None = None  # bytes on all links per second / the best raw TCP rate
    verified: bool | None = None  # None: not checked
    note: str = ""

    @staticmethod
    def from_samples(
        backend: str,
        collective: str,
        size_bytes: int,
        ranks: int,
        samples: Sequence[Sample],
        *,
        cpu_from_bytes: int = 0,
        share_of_raw: float | None = None,
        verified: bool | None = None,
        note: str = "",
    ) -> Measurement:
        """Of one backend at one size: a sample a repetition. CPU time is told from `cpu_from_bytes` on."""
        if not samples:
            raise ValueError(f"{backend} at {size_bytes} B has no samples")
        times = [sample.seconds for sample in samples]
        if min(times) <= 0:
            raise ValueError(f"{backend} at {size_bytes} B took {min(times)} s; a time must be positive")
        algbw = size_bytes / statistics.median(times) / GIGABYTE
        single = [value for sample in samples for value in sample.iteration_seconds]
        small = size_bytes <= LATENCY_LIMIT_BYTES and len(single) > 0
        cpu = statistics.median(sample.cpu_s_per_gb for sample in samples)
        return Measurement(
            backend=backend,
            collective=collective,
            bytes=size_bytes,
            iterations=samples[0].iterations,
            time_us=statistics.median(times) * 1e6,
            time_min_us=min(times) * 1e6,
            time_max_us=max(times) * 1e6,
            repetitions=len(times),
            algbw_gb_s=algbw,
            busbw_gb_s=algbw * busbw_factor(collective, ranks),
            latency_p50_us=percentile(single, 50) * 1e6 if small else None,
            latency_p99_us=percentile(single, 99) * 1e6 if small else None,
            cpu_s_per_gb=cpu if size_bytes >= cpu_from_bytes else None,
            share_of_raw=share_of_raw,
            verified=verified,
            note=note,
        )

    @property
    def busbw_range_gb_s(self) -> tuple[float, float]:
        """busbw of the slowest and of the fastest repetition."""
        scale = self.busbw_gb_s * self.time_us
        return scale / self.time_max_us, scale / self.time_min_us
