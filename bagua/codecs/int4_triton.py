"""The Triton kernels of int4.

Compression and decompression work on bytes: a tile of [ROWS, 16], whose lower halves are one tile of elements and whose
upper halves another. Sums work on words, [ROWS, 4] of eight levels each: a level becomes a float by two instructions
(`_level`), and a word is made of eight rounded floats by an addition each (`_word`). HARDWARE has no meaning here.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ARG001 (HARDWARE)

import triton
import triton.language as tl

from bagua.codecs.block_scale_triton import load_scales, scale_of, store_scales
from bagua.kernels.minmax_uint8_triton_tiles import larger, load, store

BLOCK = tl.constexpr(32)
PAYLOAD = tl.constexpr(16)
PARTS = 2  # of a tile, see fused_triton: the elements of the lower and of the upper four bits
# From 2^23 to twice as much, fp32 has the integers and nothing between them; the bits of 2^23, and 2^23 and level 0.
INTEGERS_BITS = tl.constexpr(0x4B000000)
ZERO = tl.constexpr(8388616.0)
# What is too much in a word that is the sum of eight numbers with these bits, shifted by 4, 8, ... modulo 2^32.
EXCESS = tl.constexpr(0x05000000)


@triton.jit
def _columns(BITS: tl.constexpr):
    """Of the bytes of a block. A thread holds as many of them as elements in 16 bytes: so neighboring threads have
    neighboring elements, and exchange none."""
    return tl.max_contiguous(tl.arange(0, PAYLOAD)[None, :], [1, 128 // BITS])


@triton.jit
def _rounded(values, inverse):
    """The bits of 2^23 + 8 + level."""
    return (values * inverse[:, None] + ZERO).to(tl.int32, bitcast=True)


@triton.jit
def compress_tile(
    values_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS: tl.constexpr, UNIT: tl.constexpr,
    HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = _columns(values_at.dtype.element_ty.primitive_bitwidth)
    local = tl.arange(0, ROWS)[:, None] * BLOCK + columns
    low = load(values_at + local, local < left, MASKED).to(tl.float32)
    high = load(values_at + 16 + local, local + 16 < left, MASKED).to(tl.float32)
    largest = tl.reduce(larger(tl.abs(low), tl.abs(high)), 1, larger)
    finite, inverse, bits = scale_of(largest, UNIT)
    codes = (_rounded(low, inverse) + (_rounded(high, inverse) << 4)) & 0xFF
    codes = tl.where(finite[:, None], codes, 0).to(tl.uint8)
    codes_at = chunk_at + header_bytes + row.to(tl.int64) * PAYLOAD
    store(codes_at + tl.arange(0, ROWS)[:, None] * PAYLOAD + columns, codes, rows_mask[:, None], MASKED)
    store_scales(chunk_at, rows, bits, rows_mask, MASKED)


@triton.jit
def _store_elements(numbers, scales, pointers, mask, ACCUMULATE: tl.constexpr, MASKED: tl.constexpr):
    """Numbers: the bits of 2^23 + 8 + level."""
    values = (numbers.to(tl.float32, bitcast=True) - ZERO) * scales[:, None]
    if ACCUMULATE:
        values = load(pointers, mask, MASKED).to(tl.float32) + values
    store(pointers, values.to(pointers.dtype.element_ty), mask, MASKED)


@triton.jit
def decompress_tile(
    target_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
    HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    columns = _columns(target_at.dtype.element_ty.primitive_bitwidth)
    scales = load_scales(chunk_at, rows, rows_mask, MASKED)
    codes_at = chunk_at + header_bytes + row.to(tl.int64) * PAYLOAD
    codes = load(codes_at + tl.arange(0, ROWS)[:, None] * PAYLOAD + columns, rows_mask[:, None], MASKED).to(tl.int32)
    local = tl.arange(0, ROWS)[:, None] * BLOCK + columns
    low, high = (codes & 0xF) | INTEGERS_BITS, (codes >> 4) | INTEGERS_BITS
    _store_elements(low, scales, target_at + local, local < left, ACCUMULATE, MASKED)
    _store_elements(high, scales, target_at + 16 + local, local + 16 < left, ACCUMULATE, MASKED)


@triton.jit
def offsets(ROWS: tl.constexpr, BITS: tl.constexpr):
    local = tl.arange(0, ROWS)[:, None] * BLOCK + _columns(BITS)
    return local, local + 16


@triton.jit
def decoded(chunk_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS: tl.constexpr,
            HARDWARE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    # Half a block of bytes for a block of elements.
    local = offsets[0] - tl.arange(0, ROWS)[:, None] * PAYLOAD
    scales = load_scales(chunk_at, rows, rows_mask, MASKED)
    codes_at = chunk_at + header_bytes + row.to(tl.int64) * PAYLOAD
    codes = load(codes_at + local, rows_mask[:, None], MASKED).to(tl.int32)
    low = ((codes & 0xF) | INTEGERS_BITS).to(tl.float32, bitcast=True)
    high = ((codes >> 4) | INTEGERS_BITS).to(tl.float32, bitcast=True)
    return (low - ZERO) * scales[:, None], (high - ZERO) * scales[:, None]


@triton.jit
def _level(words, NIBBLE: tl.constexpr):
    """One of eight levels of each word, as fp32.

    Its four bits stay where they are in the mantissa, below an exponent for which they count ones.
    """
    if NIBBLE > 4:
        level = _level(words >> 12, NIBBLE - 3)
    else:
        bits = (words & (0xF << (4 * NIBBLE))) | (INTEGERS_BITS - ((4 * NIBBLE) << 23))
        level = bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - 4 * NIBBLE) + 8.0)
    return level


@triton.jit
def _added(words, scales, totals):
    """The eight totals and what the levels of the words stand for, by an exact product each."""
    scales = tl.broadcast_to(scales[:, None], words.shape)
    result = ()
    for nibble in tl.static_range(8):
        result = result + (tl.fma(_level(words, nibble), scales, totals[nibble]),)
    return result


@triton.jit
def _word(totals, inverse):
    word = _rounded(totals[0], inverse)
    for nibble in tl.static_range(1, 8):
        word += _rounded(totals[nibble], inverse) << (4 * nibble)
    return word + EXCESS


@triton.jit
def sum_tile(
    received, out, factor, header_bytes, stride, row, rows, rows_mask,
    ROWS: tl.constexpr, UNIT: tl.constexpr, VERSIONS: tl.constexpr, HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    local = tl.arange(0, ROWS)[:, None] * 4 + tl.arange(0, 4)[None, :]
    first = header_bytes + row.to(tl.int64) * PAYLOAD
    words_at = (received + first).to(tl.pointer_type(tl.int32))
    zero = tl.zeros(local.shape, tl.float32)
    totals = (zero, zero, zero, zero, zero, zero, zero, zero)
    if VERSIONS <= 8:
        # All are on their way before the first is added.
        scales = ()
        words = ()
        for _ in tl.static_range(VERSIONS):
            scales = scales + (load_scales(received, rows, rows_mask, MASKED),)
            words = words + (load(words_at + local, rows_mask[:, None], MASKED),)
            received += stride
            words_at += stride // 4
        for version in tl.static_range(VERSIONS):
            totals = _added(words[version], scales[version], totals)
    else:
        for _ in tl.range(VERSIONS):
            one_scales = load_scales(received, rows, rows_mask, MASKED)
            totals = _added(load(words_at + local, rows_mask[:, None], MASKED), one_scales, totals)
            received += stride
            words_at += stride // 4
    means = ()
    for nibble in tl.static_range(8):
        means = means + (totals[nibble] * factor,)
    largest = tl.abs(means[0])
    for nibble in tl.static_range(1, 8):
        largest = larger(largest, tl.abs(means[nibble]))
    finite, inverse, bits = scale_of(tl.reduce(largest, 1, larger), UNIT)
    word = tl.where(finite[:, None], _word(means, inverse), 0)
    store((out + first).to(tl.pointer_type(tl.int32)) + local, word, rows_mask[:, None], MASKED)
    store_scales(out, rows, bits, rows_mask, MASKED)
