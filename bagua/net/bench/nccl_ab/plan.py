"""What a GPU comparison measures: collectives, and the sizes of their buffers. No torch, no processes."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.net.bench.sample import Case

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


def make_cases(collectives: Sequence[str], sizes: Sequence[int], element_bytes: int, ranks: int) -> list[Case]:
    """Sizes rounded to whole elements can meet (8 B of float32 on 4 ranks is 16 B): each is measured once."""
    return [
        Case(collective, size)
        for collective in collectives
        for size in dict.fromkeys(effective_bytes(collective, size, element_bytes, ranks) for size in sizes)
    ]
