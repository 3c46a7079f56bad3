"""Tiles of MinMaxUInt8 in device code: where they lie, how they are read and written, extremes; for the kernels of
bagua.kernels.minmax_uint8_triton_kernels, which say how they are to be compiled.

A tile is ROWS ranges by COLUMNS elements; if ROWS is not 1, a range fits into COLUMNS. A range has `block` elements,
the last of a chunk may have fewer. ALIGNED: tiles begin at multiples of 16 elements. MASKED: not all of the tile may be
elements. A tile that is full is read without a mask, in wider pieces.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_formula import bias_and_step, larger, numbers_of, smaller


@triton.jit
def load_ends(chunk_at, rows, rows_mask, MASKED: tl.constexpr):
    pairs = load(chunk_at.to(tl.pointer_type(tl.int64)) + rows, rows_mask, MASKED)
    return pairs.to(tl.int32).to(tl.float32, bitcast=True), (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_ends(chunk_at, rows, rows_mask, lowest, highest):
    pairs = chunk_at.to(tl.pointer_type(tl.float32)) + rows * 2
    tl.store(pairs, lowest, mask=rows_mask)
    tl.store(pairs + 1, highest, mask=rows_mask)


@triton.jit
def store_padding(chunk_at, elements, ranges, header_bytes, stride):
    """Zeros between the parts of a compressed chunk and after it."""
    at = tl.arange(0, 32)
    zeros = tl.zeros([32], tl.uint8)
    header_end = at.to(tl.int64) + ranges * 8
    tl.store(chunk_at + header_end, zeros, mask=header_end < header_bytes)
    end = at.to(tl.int64) + elements + header_bytes
    tl.store(chunk_at + end, zeros, mask=end < stride)


@triton.jit
def tile_at(row, tile, block, elements, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """(where it begins in its chunk, offsets in it, which of them are elements, whether all are)."""
    columns = tl.arange(0, COLUMNS)[None, :]
    first_column = tile.to(tl.int64) * COLUMNS
    start = row.to(tl.int64) * block + first_column
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    local = tl.arange(0, ROWS)[:, None] * block + columns
    mask = (columns < block - first_column) & (local < elements - start)
    full = (block - first_column >= COLUMNS) & (elements - start >= (ROWS - 1) * block + COLUMNS)
    return start, local, mask, full


@triton.jit
def load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:  # noqa: RET505 (a branch that is not taken must not be compiled)
        return tl.load(pointers)


@triton.jit
def store(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values, mask=mask)
    else:
        tl.store(pointers, values)


@triton.jit
def load_version(
    chunk_at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """(lowest, highest, levels) of a tile of a compressed chunk; the levels as words of four if that can be."""
    lowest, highest = load_ends(chunk_at, rows, rows_mask, MASKED)
    levels_at = chunk_at + header_bytes + first
    if ALIGNED and not MASKED and local.shape[1] >= 4:
        words = tl.arange(0, local.shape[0])[:, None] * (block // 4) + tl.arange(0, local.shape[1] // 4)[None, :]
        levels = tl.load(levels_at.to(tl.pointer_type(tl.int32)) + words)
    else:
        levels = load(levels_at + local, mask, MASKED)
    return lowest, highest, levels


@triton.jit
def decoded(lowest, highest, levels):
    """fp32 elements, of which some may lie half a level outside of their range."""
    bias, step = bias_and_step(lowest, highest)
    return (numbers_of(levels) - bias[:, None]) * step[:, None]


@triton.jit
def lowest_and_highest(values, mask, MASKED: tl.constexpr):
    """Of each row."""
    if MASKED:
        lowest = tl.reduce(tl.where(mask, values, float("inf")), 1, smaller)
        highest = tl.reduce(tl.where(mask, values, float("-inf")), 1, larger)
    else:
        lowest = tl.reduce(values, 1, smaller)
        highest = tl.reduce(values, 1, larger)
    return lowest, highest
