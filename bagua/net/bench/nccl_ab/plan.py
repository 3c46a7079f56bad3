"""What a GPU comparison measures, in which order: sizes, cases, turns. No torch, no processes.

Order: every size is verified and calibrated first; then repetition follows repetition over all sizes, and within a
size the backends take turns, each repetition beginning with another one. A drift of the machine then falls on all
backends alike, and a run that is stopped early has few repetitions of every size instead of none of some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagua.net.bench.measurement import LATENCY_LIMIT_BYTES
from bagua.net.bench.turns import rotated

GPU_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}

# These cut their buffer into one part for each rank, so its size is a multiple of the rank count.
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all")


def effective_bytes(collective: str, size_bytes: int, element_bytes: int, ranks: int) -> int:
    """The nearest size above that holds whole elements for every rank. The meaning of a size is nccl-tests': the
    larger of send and receive buffer."""
    unit = element_bytes * ranks if collective in _SPLIT else element_bytes
    return -(-size_bytes // unit) * unit


def link_bytes(collective: str, size_bytes: int, ranks: int) -> int:
    """Bytes that cross connections in one operation, all ranks together, in NCCL's ring (or pairwise) patterns."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) * size_bytes
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        return (ranks - 1) * size_bytes
    if collective == "send_recv":
        return ranks * size_bytes
    raise ValueError(f"unknown collective {collective!r}; known: {', '.join(GPU_COLLECTIVES)}")


def buffer_bytes(collective: str, size_bytes: int, ranks: int) -> tuple[int, int]:
    """Bytes of the send and of the receive buffer; all_reduce and broadcast work in place."""
    if collective in ("all_reduce", "broadcast"):
        return 0, size_bytes
    if collective == "all_gather":
        return size_bytes // ranks, size_bytes
    if collective == "reduce_scatter":
        return size_bytes, size_bytes // ranks
    if collective in ("all_to_all", "send_recv"):
        return size_bytes, size_bytes
    raise ValueError(f"unknown collective {collective!r}; known: {', '.join(GPU_COLLECTIVES)}")


@dataclass(frozen=True)
class Case:
    """One operation at one size: what one group of rows compares."""

    collective: str
    bytes: int

    @property
    def wants_latency(self) -> bool:
        """Small enough that the single iteration is timed too (p50, p99)."""
        return self.bytes <= LATENCY_LIMIT_BYTES


@dataclass(frozen=True)
class Turn:
    """One backend measures one case once."""

    case: Case
    backend: int
    repetition: int


def make_cases(collectives: Sequence[str], sizes: Sequence[int], element_bytes: int, ranks: int) -> list[Case]:
    """Sizes rounded to whole elements can meet (8 B of float32 on 4 ranks is 16 B): each is measured once."""
    return [
        Case(collective, size)
        for collective in collectives
        for size in dict.fromkeys(effective_bytes(collective, size, element_bytes, ranks) for size in sizes)
    ]


def turns(cases: Sequence[Case], backends: int, repetitions: int) -> Iterator[Turn]:
    for repetition in range(repetitions):
        for index, case in enumerate(cases):
            # The shift by the case as well keeps one backend from always following the same large transfer.
            for backend in rotated(range(backends), repetition + index):
                yield Turn(case, backend, repetition)
