"""The ring's traffic: NCCL's slices of up to 1 MiB, four under way on each connection, in slots that are used again.

`tools/bench/ring_schedule.h` has the pattern itself.
"""

from __future__ import annotations

SLICE_BYTES = 1 << 20
DEPTH = 4
_SLOTS_PER_CHANNEL = 2 * DEPTH


def ring_memory_bytes(size_bytes: int, ranks: int, channels: int) -> int:
    """What a rank's messages pass through when it all-reduces `size_bytes`: its slots, as far as slices fill them."""
    share = -(-size_bytes // (ranks * channels))
    return channels * _SLOTS_PER_CHANNEL * min(SLICE_BYTES, share)
