"""MinMaxUInt8: the bytes of a compressed chunk, which every implementation reads and writes.

offset                      bytes        content
0                           8 * ranges   for every range its smallest and its largest element, fp32, little-endian
8 * ranges                  -            zeros up to the next multiple of 32
header_bytes                elements     a byte per element
header_bytes + elements     -            zeros up to the next multiple of 32: total_bytes
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# Parts of a chunk begin at multiples of this, so that vector loads of chunks in a row stay aligned.
ALIGNMENT = 32
# One fp32 pair (min, max).
RANGE_BYTES = 8


def padded(count: int) -> int:
    """`count` bytes rounded up to the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


# Compared by identity, since every operation looks launches up by it; `chunk_layout` returns the same object again.
@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """Where what lies in one compressed chunk."""

    elements: int
    """Elements of the chunk."""
    block: int
    """Elements of a range; the last range may have fewer. At least 1."""
    ranges: int
    header_bytes: int
    total_bytes: int


@functools.lru_cache(maxsize=4096)
def chunk_layout(elements: int, block_elements: int | None) -> ChunkLayout:
    """The layout of a chunk of `elements` elements; `block_elements` None: one range for all of them.

    Raises:
        ValueError: a number is negative, or the block is empty.
    """
    if elements < 0:
        raise ValueError(f"a chunk cannot have {elements} elements; give 0 or more")
    if block_elements is not None and block_elements < 1:
        raise ValueError(
            f"block_elements is {block_elements}; a range has at least 1 element, None makes one range of the chunk"
        )
    block = max(elements, 1) if block_elements is None else min(block_elements, max(elements, 1))
    ranges = -(-elements // block)
    header_bytes = padded(RANGE_BYTES * ranges)
    return ChunkLayout(elements, block, ranges, header_bytes, header_bytes + padded(elements))
