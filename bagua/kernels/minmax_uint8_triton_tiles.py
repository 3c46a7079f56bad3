"""Tiles of MinMaxUInt8 in device code: where they lie, how they are read and written, sums of versions, extremes; for
the kernels of bagua.kernels.minmax_uint8_triton_kernels, which say how they are to be compiled.

A tile is ROWS ranges by COLUMNS elements; if ROWS is not 1, a range fits into COLUMNS. A range has `block` elements,
the last of a chunk may have fewer. ALIGNED: tiles begin at multiples of 16 elements. MASKED: not all of the tile may be
elements. A tile that is full is read without a mask, in wider pieces.

If VERSIONS is 0, `source` is a tensor of floats, else compressed: so many versions of one chunk, whose sum times
`factor` is meant. Sums of several versions are bound by the number of instructions, not by memory: every one for an
element, and every one for a range, which a warp holds, counts.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_formula import (
    bias_and_step,
    canonical,
    larger,
    numbers_of,
    scale_and_bias,
    smaller,
)


@triton.jit
def _load_ends(chunk_at, rows, rows_mask, MASKED: tl.constexpr):
    pairs = chunk_at.to(tl.pointer_type(tl.float32)) + rows * 2
    return load(pairs, rows_mask, MASKED), load(pairs + 1, rows_mask, MASKED)


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
    lowest, highest = _load_ends(chunk_at, rows, rows_mask, MASKED)
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
def _sum_at_once(
    source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 elements of all versions, which are on their way together."""
    at = source
    loaded = ()
    for _ in tl.static_range(VERSIONS):
        loaded = loaded + load_version(at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED)
        at += stride
    values = decoded(loaded[0], loaded[1], loaded[2])
    for version in tl.static_range(1, VERSIONS):
        values += decoded(loaded[3 * version], loaded[3 * version + 1], loaded[3 * version + 2])
    return values


@triton.jit
def _sum_in_turns(
    source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The same in a loop: registers for many versions would leave room for too few warps."""
    low, high, levels = load_version(source, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED)
    at = source
    if levels.dtype == tl.uint8 or VERSIONS == 1:
        values = decoded(low, high, levels)
        for _ in tl.range(1, VERSIONS):
            at += stride
            low, high, levels = load_version(
                at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED
            )
            values += decoded(low, high, levels)
    else:
        # The next version is on its way while one is added.
        at += stride
        next_low, next_high, next_levels = load_version(
            at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED
        )
        values = decoded(low, high, levels)
        for _ in tl.range(2, VERSIONS):
            low, high, levels = next_low, next_high, next_levels
            at += stride
            next_low, next_high, next_levels = load_version(
                at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED
            )
            values += decoded(low, high, levels)
        values += decoded(next_low, next_high, next_levels)
    return values


@triton.jit
def values_of(
    source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 elements of the tile that begins with element `first`, or the sum of its versions; anything where masked."""
    if VERSIONS == 0:
        values = load(source + first + local, mask, MASKED).to(tl.float32)
    elif AT_ONCE and ALIGNED and not MASKED:  # as words: every byte would take a register
        values = _sum_at_once(
            source, header_bytes, stride, first, block, local, mask, rows, rows_mask, VERSIONS, ALIGNED, MASKED
        )
    else:
        values = _sum_in_turns(
            source, header_bytes, stride, first, block, local, mask, rows, rows_mask, VERSIONS, ALIGNED, MASKED
        )
    return values


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


@triton.jit
def range_of(lowest, highest, factor, VERSIONS: tl.constexpr):
    """(lowest, highest, scale, bias) of what is compressed, of the extremes of `values_of`. The scale is for those."""
    if VERSIONS != 0:
        lowest *= factor
        highest *= factor
    lowest, highest = canonical(lowest, highest)
    scale, bias = scale_and_bias(lowest, highest)
    if VERSIONS != 0:
        scale *= factor
    return lowest, highest, scale, bias
