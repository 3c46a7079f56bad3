"""Whether the largest case fits on every GPU, asked before the first of them: a rank that runs out of memory in the
middle of a collective would leave the others waiting for it.

Backends hold buffers only while it is their turn, so that one backend's buffers are what has to fit beside the CUDA
contexts and NCCL's own memory of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.group import Group
from bagua.net.bench.nccl_ab.plan import buffer_bytes
from bagua.net.bench.sample import Case
from bagua.net.bench.sizes import format_size

# The verification's work space (a handful of 32 MiB arrays), and connections that open with the first operation.
_BESIDE_BUFFERS = 512 << 20


def needed_bytes(case: Case, ranks: int) -> int:
    # Buffers below this are not what fills a GPU, and their verification needs less.
    return sum(buffer_bytes(case.collective, case.bytes, ranks)) + min(_BESIDE_BUFFERS, 16 * case.bytes)


def check_memory(groups: Sequence[Group], cases: Sequence[Case], timeout_s: float, ranks_per_gpu: int = 1) -> None:
    """
    Raises:
        BenchError: a rank has too little; names the case, the need, the rank and the remedy.
    """
    alive = [group for group in groups if group.is_alive]
    free = _free_bytes(alive, timeout_s)
    if not free:
        return
    largest = max(cases, key=lambda case: needed_bytes(case, len(free)))
    needed = ranks_per_gpu * needed_bytes(largest, len(free))
    rank = min(range(len(free)), key=lambda index: free[index])
    if needed > free[rank]:
        raise BenchError(
            f"{largest.collective} of {format_size(largest.bytes)} needs {format_size(needed)} of memory on each GPU,"
            f" and rank {rank} has {format_size(free[rank])} left beside the processes of {len(alive)} backends;"
            " lower -e/--maxbytes, or run fewer backends (--tuned, --variant)"
        )


def _free_bytes(groups: Sequence[Group], timeout_s: float) -> list[int]:
    """By rank. All backends have a process on each GPU and see the same, so the first that answers is enough."""
    for group in groups:
        try:
            return group.free_bytes(timeout_s)
        except BenchError:
            continue  # The run's first question to it fails as well, and is reported there.
    return []
