"""The formula of MinMaxUInt8 in device code, for rows of elements that have a range each; and tiles: where they lie,
how they are read and written, extremes. For the kernels of bagua.kernels.minmax_uint8_triton_kernels, which say how
they are to be compiled.

Rows are [ROWS, COLUMNS], what belongs to a range is [ROWS]; numbers are fp32. bagua.kernels.minmax_uint8_reference has
the formula and its words.

A tile is ROWS ranges by COLUMNS elements; if ROWS is not 1, a range fits into COLUMNS. A range has `block` elements,
the last of a chunk may have fewer. ALIGNED: tiles begin at multiples of 16 elements. MASKED: not all of the tile may be
elements. A tile that is full is read without a mask, in wider pieces.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os

import triton
import triton.language as tl

# 1 / 127.5 as fp32 has it.
UNITS_PER_LEVEL = tl.constexpr(0.007843137718737125)
# From here to twice as much, fp32 has the integers and nothing between them; its bits are 4B 00 00 00.
INTEGERS = tl.constexpr(8388608.0)
INTEGERS_BITS = tl.constexpr(0x4B000000)
# The interpreter of Triton has no inline assembly.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def smaller(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def canonical(lowest, highest):
    """As they are stored: both NaN if one is not finite, and no -0.0."""
    finite = (tl.abs(lowest) < float("inf")) & (tl.abs(highest) < float("inf"))
    return tl.where(finite, lowest + 0.0, float("nan")), tl.where(finite, highest + 0.0, float("nan"))


@triton.jit
def rint(number):
    """To the nearest integer, half to even."""
    if INTERPRETED:
        shift = tl.where(number < 0.0, 0.0 - INTEGERS, INTEGERS)
        rounded = tl.where(tl.abs(number) < INTEGERS, (number + shift) - shift, number)
    else:
        rounded = tl.inline_asm_elementwise(
            "cvt.rni.f32.f32 $0, $1;", "=r,r", [number], dtype=tl.float32, is_pure=True, pack=1
        )
    return rounded


@triton.jit
def scale_and_top(lowest, highest):
    """(levels per unit, rint(highest * levels per unit)); 0 levels per unit if there is but one level."""
    half = highest * 0.5 - lowest * 0.5
    scale = tl.div_rn(tl.full(half.shape, 127.5, tl.float32), half)
    scale = tl.where(tl.abs(scale) < float("inf"), scale, 0.0)
    return scale, rint(highest * scale)


@triton.jit
def scale_and_bias(lowest, highest):
    """(levels per unit, bias); 0 levels per unit if there is but one level."""
    scale, top = scale_and_top(lowest, highest)
    return scale, tl.full(top.shape, INTEGERS + 255.0, tl.float32) - top


@triton.jit
def closest_to_zero(lowest, highest):
    """The number of ranges; NaN stays."""
    return smaller(larger(lowest, 0.0), highest)


@triton.jit
def bias_and_step(lowest, highest):
    """(bias, units per level)."""
    scale, bias = scale_and_bias(lowest, highest)
    step = (highest * 0.5 - lowest * 0.5) * UNITS_PER_LEVEL
    # One level: (255 - 254) * what it stands for.
    bias = tl.where(scale == 0.0, INTEGERS + 254.0, bias)
    return bias, tl.where(scale == 0.0, closest_to_zero(lowest, highest), step)


@triton.jit
def quantized(values, scale, bias):
    """Bytes of rows of elements, 0 where scale and bias are NaN."""
    numbers = values * scale[:, None] + bias[:, None]
    # Not a maximum, which for NaN is the other number on devices and NaN in the interpreter.
    numbers = tl.minimum(tl.where(numbers > INTEGERS, numbers, INTEGERS), INTEGERS + 255.0)
    return (numbers.to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def number(level):
    """INTEGERS + level, the last byte of whose bits is the level."""
    return (level.to(tl.int32) | INTEGERS_BITS).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(levels):
    """INTEGERS + level of bytes, or of words of four bytes: [ROWS, N] -> [ROWS, 4 * N], by one instruction for each."""
    if levels.dtype == tl.uint8:
        numbers = number(levels)
    else:
        if INTERPRETED:
            first, second = number(levels & 0xFF), number((levels >> 8) & 0xFF)
            third, fourth = number((levels >> 16) & 0xFF), number((levels >> 24) & 0xFF)
        else:
            first, second, third, fourth = tl.inline_asm_elementwise(
                "prmt.b32 $0, $4, 0x4B000000, 0x7440; prmt.b32 $1, $4, 0x4B000000, 0x7441;"
                "prmt.b32 $2, $4, 0x4B000000, 0x7442; prmt.b32 $3, $4, 0x4B000000, 0x7443;",
                "=&r,=&r,=&r,=&r,r",
                [levels],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=True,
                pack=1,
            )
        numbers = tl.join(tl.join(first, third), tl.join(second, fourth))
        numbers = tl.reshape(numbers, [levels.shape[0], 4 * levels.shape[1]])
    return numbers


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
