"""Tiles of sums of MinMaxUInt8 in device code: where their words lie, what versions weigh, sums, extremes; for the
kernels of bagua.kernels.minmax_uint8_triton_sum_kernels, which say how they are to be compiled.

A tile, ROWS ranges by COLUMNS elements, is held as four tensors [ROWS, COLUMNS // 4]: the first elements of words of
four, the second, the third and the fourth, so that words need not be put in another order. MASKED: not all of the tile
may be elements, but `left` from the first of each word on. ALIGNED: tiles begin at multiples of 16 elements, and words
are read and written, the last of a chunk with some of its padding; otherwise bytes, MASKED.

Versions lie `stride` bytes after each other from `source` on. Up to CHAIN of them are weighed first, and their sum is a
chain of multiply-adds; of more the weights are found in a loop that adds, as registers would not hold them. WIDEST is
the weight of the widest. Work for a range is repeated by every thread of the warp, so it is kept short.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_sum_formula import (
    CHAIN,
    NARROWEST,
    ORIGIN_BITS,
    added,
    added_alone,
    bits_of,
    half_of,
    number_of,
    numbers_of_words,
    start_of,
    weight_of,
    words_of_highest_bytes,
    zero_of,
)
from bagua.kernels.minmax_uint8_triton_tiles import load, load_ends, store

# Beyond all sums, and so close to each other that differences have 32 bits.
SMALLEST_OF_NONE = tl.constexpr(3 * 2**29)
LARGEST_OF_NONE = tl.constexpr(-(2**29))


@triton.jit
def words_at(row, tile, block, elements, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """(where the tile begins in its chunk, offsets of words in it, elements left from there on, whether it is full)."""
    columns = tl.arange(0, COLUMNS // 4)[None, :] * 4
    first_column = tile.to(tl.int64) * COLUMNS
    start = row.to(tl.int64) * block + first_column
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    local = tl.arange(0, ROWS)[:, None] * block + columns
    # 32 bits are enough for what is in a tile: a range fits into COLUMNS, or there is one row.
    in_range = tl.minimum(block - first_column, COLUMNS).to(tl.int32)
    in_chunk = tl.minimum(elements - start, ROWS * COLUMNS).to(tl.int32)
    left = tl.minimum(in_range - columns, in_chunk - local)
    full = (in_range == COLUMNS) & (elements - start >= (ROWS - 1) * block + COLUMNS)
    return start, local, left, full


@triton.jit
def _words(at, block, local):
    """Pointers to the words of an aligned tile that begins there."""
    rows = tl.arange(0, local.shape[0])[:, None] * (block // 4)
    return at.to(tl.pointer_type(tl.int32)) + rows + tl.arange(0, local.shape[1])[None, :]


@triton.jit
def _load_words(at, stride, block, local, left, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """A tuple of COUNT versions' words; the first begin at `at`."""
    words = ()
    for _ in tl.static_range(COUNT):
        words = words + (load(_words(at, block, local), left > 0, MASKED),)
        at += stride
    return words


@triton.jit
def load_first_words(
    at, stride, block, local, left,
    VERSIONS: tl.constexpr, AHEAD: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of AHEAD versions, as a tuple; none if there are more than CHAIN versions, or if bytes are read."""
    words = ()
    if ALIGNED and VERSIONS <= CHAIN:
        words = _load_words(at, stride, block, local, left, AHEAD, MASKED)
    return words


@triton.jit
def store_result(at, block, local, left, first, second, third, fourth, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    """The highest bytes of integers, and zeros as padding that is in words."""
    if ALIGNED:
        if MASKED:
            second, third = tl.where(left > 1, second, 0), tl.where(left > 2, third, 0)
            fourth = tl.where(left > 3, fourth, 0)
        store(_words(at, block, local), words_of_highest_bytes(first, second, third, fourth), left > 0, MASKED)
    else:
        tl.store(at + local, (first >> 24).to(tl.uint8), mask=left > 0)
        tl.store(at + local + 1, (second >> 24).to(tl.uint8), mask=left > 1)
        tl.store(at + local + 2, (third >> 24).to(tl.uint8), mask=left > 2)
        tl.store(at + local + 3, (fourth >> 24).to(tl.uint8), mask=left > 3)


@triton.jit
def load_all_ends(source, stride, rows, rows_mask, VERSIONS: tl.constexpr, MASKED: tl.constexpr):
    """A tuple, lowest and highest of each version; none of more than CHAIN versions."""
    ends = ()
    if VERSIONS <= CHAIN:
        for _ in tl.static_range(VERSIONS):
            ends = ends + load_ends(source, rows, rows_mask, MASKED)
            source += stride
    return ends


@triton.jit
def widest_of(ends, source, stride, rows, rows_mask, VERSIONS: tl.constexpr, MASKED: tl.constexpr):
    """Half of the range of the widest version, at least NARROWEST. `ends`: by `load_all_ends`."""
    widest = tl.full(rows.shape, NARROWEST, tl.float32)
    if VERSIONS <= CHAIN:
        for version in tl.static_range(VERSIONS):
            widest = tl.maximum(widest, half_of(ends[2 * version], ends[2 * version + 1]))
    else:
        for _ in tl.range(VERSIONS):
            lowest, highest = load_ends(source, rows, rows_mask, MASKED)
            widest = tl.maximum(widest, half_of(lowest, highest))
            source += stride
    return widest


@triton.jit
def weights_of(ends, widest, VERSIONS: tl.constexpr, WIDEST: tl.constexpr):
    """A tuple; none of more than CHAIN versions. `widest`: by `widest_of`."""
    weights = ()
    if VERSIONS <= CHAIN:
        for version in tl.static_range(VERSIONS):
            half = half_of(ends[2 * version], ends[2 * version + 1])
            weights = weights + (weight_of(half, widest, WIDEST),)
    return weights


@triton.jit
def _start_of_chain(weights, VERSIONS: tl.constexpr):
    weight = weights[0]
    for version in tl.static_range(1, VERSIONS):
        weight += weights[version]
    return start_of(weight, VERSIONS)


@triton.jit
def base_and_zero(
    ends, weights, widest, source, stride, rows, rows_mask,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(what the versions' levels that are closest to zero stand for, their sum)."""
    if VERSIONS <= CHAIN:
        number, base = zero_of(ends[0], ends[1], half_of(ends[0], ends[1]))
        zero = added(number, weights[0], _start_of_chain(weights, VERSIONS))
        for version in tl.static_range(1, VERSIONS):
            lowest, highest = ends[2 * version], ends[2 * version + 1]
            number, part = zero_of(lowest, highest, half_of(lowest, highest))
            base += part
            zero = added(number, weights[version], zero)
        zero = bits_of(zero)
    else:
        base = tl.zeros(rows.shape, tl.float32)
        zero = tl.zeros(rows.shape, tl.int32)
        for _ in tl.range(VERSIONS):
            lowest, highest = load_ends(source, rows, rows_mask, MASKED)
            half = half_of(lowest, highest)
            number, part = zero_of(lowest, highest, half)
            base += part
            zero = added_alone(number, weight_of(half, widest, WIDEST), zero)
            source += stride
    return base, zero


@triton.jit
def _sums_in_a_chain(
    words, weights, at, stride, block, local, left, VERSIONS: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr
):
    """Of versions of which AHEAD were loaded."""
    for _ in tl.static_range(AHEAD):
        at += stride
    start = _start_of_chain(weights, VERSIONS)[:, None]
    first, second, third, fourth = start, start, start, start
    for version in tl.static_range(VERSIONS):
        one, two, three, four = numbers_of_words(words[version])
        weight = weights[version][:, None]
        first, second = added(one, weight, first), added(two, weight, second)
        third, fourth = added(three, weight, third), added(four, weight, fourth)
        if version + AHEAD < VERSIONS:
            words = words + _load_words(at, stride, block, local, left, 1, MASKED)
            at += stride
    return bits_of(first), bits_of(second), bits_of(third), bits_of(fourth)


@triton.jit
def _added_words(lowest, highest, words, widest, first, second, third, fourth, WIDEST: tl.constexpr):
    weight = weight_of(half_of(lowest, highest), widest, WIDEST)[:, None]
    one, two, three, four = numbers_of_words(words)
    first, second = added_alone(one, weight, first), added_alone(two, weight, second)
    third, fourth = added_alone(three, weight, third), added_alone(four, weight, fourth)
    return first, second, third, fourth


@triton.jit
def _sums_in_a_loop(
    widest, source, stride, at, block, local, left, rows, rows_mask,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The next version is on its way while one is added."""
    first = tl.zeros(local.shape, tl.int32)
    second, third, fourth = first, first, first
    lowest, highest = load_ends(source, rows, rows_mask, MASKED)
    words = load(_words(at, block, local), left > 0, MASKED)
    for _ in tl.range(1, VERSIONS):
        source += stride
        at += stride
        next_lowest, next_highest = load_ends(source, rows, rows_mask, MASKED)
        next_words = load(_words(at, block, local), left > 0, MASKED)
        first, second, third, fourth = _added_words(
            lowest, highest, words, widest, first, second, third, fourth, WIDEST
        )
        lowest, highest, words = next_lowest, next_highest, next_words
    return _added_words(lowest, highest, words, widest, first, second, third, fourth, WIDEST)


@triton.jit
def _sums_of_bytes(
    widest, source, stride, at, local, left, rows, rows_mask, VERSIONS: tl.constexpr, WIDEST: tl.constexpr
):
    """Of any number of versions."""
    first = tl.full(local.shape, ORIGIN_BITS if VERSIONS <= CHAIN else 0, tl.int32)
    second, third, fourth = first, first, first
    for _ in tl.range(VERSIONS):
        lowest, highest = load_ends(source, rows, rows_mask, True)
        weight = weight_of(half_of(lowest, highest), widest, WIDEST)[:, None]
        one = tl.load(at + local, mask=left > 0, other=0)
        two = tl.load(at + local + 1, mask=left > 1, other=0)
        three = tl.load(at + local + 2, mask=left > 2, other=0)
        four = tl.load(at + local + 3, mask=left > 3, other=0)
        first, second = added_alone(number_of(one), weight, first), added_alone(number_of(two), weight, second)
        third, fourth = added_alone(number_of(three), weight, third), added_alone(number_of(four), weight, fourth)
        source += stride
        at += stride
    return first, second, third, fourth


@triton.jit
def sums_of(
    words, weights, widest, source, stride, at, block, local, left, rows, rows_mask,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, AHEAD: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Four tensors of integers. `at`: the first version's part of the tile, AHEAD versions of which `words` has."""
    if not ALIGNED:
        sums = _sums_of_bytes(widest, source, stride, at, local, left, rows, rows_mask, VERSIONS, WIDEST)
    elif VERSIONS <= CHAIN:
        sums = _sums_in_a_chain(words, weights, at, stride, block, local, left, VERSIONS, AHEAD, MASKED)
    else:
        sums = _sums_in_a_loop(
            widest, source, stride, at, block, local, left, rows, rows_mask, VERSIONS, WIDEST, MASKED
        )
    return sums


@triton.jit
def smallest_and_largest(first, second, third, fourth, left, MASKED: tl.constexpr):
    """Of words, each."""
    if MASKED:
        smallest = tl.minimum(
            tl.minimum(tl.where(left > 0, first, SMALLEST_OF_NONE), tl.where(left > 1, second, SMALLEST_OF_NONE)),
            tl.minimum(tl.where(left > 2, third, SMALLEST_OF_NONE), tl.where(left > 3, fourth, SMALLEST_OF_NONE)),
        )
        largest = tl.maximum(
            tl.maximum(tl.where(left > 0, first, LARGEST_OF_NONE), tl.where(left > 1, second, LARGEST_OF_NONE)),
            tl.maximum(tl.where(left > 2, third, LARGEST_OF_NONE), tl.where(left > 3, fourth, LARGEST_OF_NONE)),
        )
    else:
        smallest = tl.minimum(tl.minimum(first, second), tl.minimum(third, fourth))
        largest = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    return smallest, largest
