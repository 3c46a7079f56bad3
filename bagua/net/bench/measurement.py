"""One measured row: a backend at one size. algbw and busbw as nccl-tests defines them (doc/PERFORMANCE.md)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

GIGABYTE = 1e9

# p50 and p99 are shown up to this size; above it a time is bandwidth, not latency.
LATENCY_LIMIT_BYTES = 64 * 1024

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


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that was really measured, never an interpolation."""
    if not samples:
        raise ValueError("no samples to take a percentile of")
    if not 0 < percent <= 100:
        raise ValueError(f"percentile {percent} is outside (0, 100]")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True)
class Measurement:
    """What the table, the exports and the plot show of one backend at one size."""

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
        *,
        backend: str,
        collective: str,
        size_bytes: int,
        ranks: int,
        iterations: int,
        repetition_seconds: Sequence[float],
        iteration_seconds: Sequence[float] = (),
        cpu_s_per_gb: float | None = None,
        share_of_raw: float | None = None,
        verified: bool | None = None,
        note: str = "",
    ) -> Measurement:
        """repetition_seconds: elapsed / iterations of each repetition (the slowest rank's). iteration_seconds: the
        single iterations of all repetitions, for p50 and p99; leave it empty where they were not timed one by one."""
        if not repetition_seconds:
            raise ValueError(f"{backend} at {size_bytes} B has no samples")
        if min(repetition_seconds) <= 0:
            raise ValueError(f"{backend} at {size_bytes} B took {min(repetition_seconds)} s; a time must be positive")
        seconds = statistics.median(repetition_seconds)
        algbw = size_bytes / seconds / GIGABYTE
        small = size_bytes <= LATENCY_LIMIT_BYTES and len(iteration_seconds) > 0
        return Measurement(
            backend=backend,
            collective=collective,
            bytes=size_bytes,
            iterations=iterations,
            time_us=seconds * 1e6,
            time_min_us=min(repetition_seconds) * 1e6,
            time_max_us=max(repetition_seconds) * 1e6,
            repetitions=len(repetition_seconds),
            algbw_gb_s=algbw,
            busbw_gb_s=algbw * busbw_factor(collective, ranks),
            latency_p50_us=percentile(iteration_seconds, 50) * 1e6 if small else None,
            latency_p99_us=percentile(iteration_seconds, 99) * 1e6 if small else None,
            cpu_s_per_gb=cpu_s_per_gb,
            share_of_raw=share_of_raw,
            verified=verified,
            note=note,
        )

    @property
    def busbw_range_gb_s(self) -> tuple[float, float]:
        """busbw of the slowest and of the fastest repetition: the band of the plot."""
        scale = self.busbw_gb_s * self.time_us
        return scale / self.time_max_us, scale / self.time_min_us
