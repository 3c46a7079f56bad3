"""The device code of sums of MinMaxUInt8: Triton kernels that bagua.kernels.minmax_uint8_triton launches.

They are to be compiled, and take arguments, as those of bagua.kernels.minmax_uint8_triton_kernels. `source` has
VERSIONS versions of one chunk, whose sum times `factor` is meant. bagua.kernels.minmax_uint8_triton_sum_tiles says what
a tile is, and what ROWS, COLUMNS, WIDEST, ALIGNED and MASKED mean. The words of the first AHEAD versions, if there are
not many versions, are loaded before anything is computed.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_sum_formula import range_of_sum, requantization, requantized
from bagua.kernels.minmax_uint8_triton_sum_tiles import (
    LARGEST_OF_NONE,
    SMALLEST_OF_NONE,
    base_and_zero,
    load_all_ends,
    load_first_words,
    smallest_and_largest,
    store_result,
    sums_of,
    weights_of,
    widest_of,
    words_at,
)
from bagua.kernels.minmax_uint8_triton_tiles import store_ends, store_padding


@triton.jit
def _sum_tile(
    source, pairs, partials, out, header_bytes, stride, factor, start, block, local, left, rows, rows_mask, is_first,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, AHEAD: tl.constexpr, PARTIALS: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Ranges that are in the tile or, if PARTIALS is not 0, a part of one with so many of `pairs`."""
    at = source + header_bytes + start
    ends = load_all_ends(source, stride, rows, rows_mask, VERSIONS, MASKED)
    words = load_first_words(at, stride, block, local, left, VERSIONS, AHEAD, ALIGNED, MASKED)
    if PARTIALS != 0:
        partial = tl.arange(0, PARTIALS)
        smallest = tl.load(pairs + 2 * partial, mask=partial < partials, other=SMALLEST_OF_NONE)
        largest = tl.load(pairs + 2 * partial + 1, mask=partial < partials, other=LARGEST_OF_NONE)
        smallest = tl.full(rows.shape, tl.min(smallest, 0), tl.int32)
        largest = tl.full(rows.shape, tl.max(largest, 0), tl.int32)
    widest = widest_of(ends, source, stride, rows, rows_mask, VERSIONS, MASKED)
    weights = weights_of(ends, widest, VERSIONS, WIDEST)
    base, zero = base_and_zero(ends, weights, widest, source, stride, rows, rows_mask, VERSIONS, WIDEST, MASKED)
    first, second, third, fourth = sums_of(
        words, weights, widest, source, stride, at, block, local, left, rows, rows_mask,
        VERSIONS, WIDEST, AHEAD, ALIGNED, MASKED,
    )  # fmt: skip
    if PARTIALS == 0:
        smallest, largest = smallest_and_largest(first, second, third, fourth, left, MASKED)
        smallest, largest = tl.min(smallest, 1), tl.max(largest, 1)
    lowest, highest, scale, top = range_of_sum(base, zero, widest, smallest, largest, factor, WIDEST)
    times, plus, right = requantization(lowest, scale, top, smallest, largest, VERSIONS)
    store_result(
        out + header_bytes + start, block, local, left,
        requantized(first, smallest, times, plus, right, VERSIONS),
        requantized(second, smallest, times, plus, right, VERSIONS),
        requantized(third, smallest, times, plus, right, VERSIONS),
        requantized(fourth, smallest, times, plus, right, VERSIONS),
        ALIGNED, MASKED,
    )  # fmt: skip
    store_ends(out, rows, rows_mask & is_first, lowest, highest)


@triton.jit(do_not_specialize=["ranges"])
def sum_ranges(
    source, out, elements, block, ranges, header_bytes, stride, factor,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Ranges that fit into a tile: read, added, and written while the sums are in registers. One program per tile."""
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < ranges
    start, local, left, full = words_at(row, tl.zeros_like(row), block, elements, ROWS, COLUMNS, ALIGNED)
    if ALIGNED and full:
        _sum_tile(
            source, source, 0, out, header_bytes, stride, factor, start, block, local, left, rows, rows_mask, True,
            VERSIONS, WIDEST, AHEAD, 0, ALIGNED, False,
        )  # fmt: skip
    else:  # fewer ahead: with the masks they would take more registers than full tiles do
        _sum_tile(
            source, source, 0, out, header_bytes, stride, factor, start, block, local, left, rows, rows_mask, True,
            VERSIONS, WIDEST, min(AHEAD, 2), 0, ALIGNED, True,
        )  # fmt: skip
    if row + ROWS >= ranges:
        store_padding(out, elements, ranges, header_bytes, stride)


@triton.jit
def _measure_tile(
    weights, widest, source, header_bytes, stride, start, block, local, left, rows, rows_mask,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, AHEAD: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = source + header_bytes + start
    words = load_first_words(at, stride, block, local, left, VERSIONS, AHEAD, ALIGNED, MASKED)
    first, second, third, fourth = sums_of(
        words, weights, widest, source, stride, at, block, local, left, rows, rows_mask,
        VERSIONS, WIDEST, AHEAD, ALIGNED, MASKED,
    )  # fmt: skip
    return smallest_and_largest(first, second, third, fourth, left, MASKED)


@triton.jit(do_not_specialize=["ranges", "partials"])
def measure_sums(
    source, pairs, elements, block, ranges, partials, header_bytes, stride,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Long ranges, first step: the smallest and the largest sum, int32, `partials` pairs of each, of up to STEPS tiles
    each. One program per pair."""
    program = tl.program_id(0)
    row = program // partials
    rows = row + tl.arange(0, 1)
    rows_mask = rows < ranges
    ends = load_all_ends(source, stride, rows, rows_mask, VERSIONS, False)
    widest = widest_of(ends, source, stride, rows, rows_mask, VERSIONS, False)
    weights = weights_of(ends, widest, VERSIONS, WIDEST)
    smallest = tl.full([1, COLUMNS // 4], SMALLEST_OF_NONE, tl.int32)
    largest = tl.full([1, COLUMNS // 4], LARGEST_OF_NONE, tl.int32)
    tile = program % partials
    for _ in range(STEPS):
        start, local, left, full = words_at(row, tile, block, elements, 1, COLUMNS, ALIGNED)
        if ALIGNED and full:
            low, high = _measure_tile(
                weights, widest, source, header_bytes, stride, start, block, local, left, rows, rows_mask,
                VERSIONS, WIDEST, AHEAD, ALIGNED, False,
            )  # fmt: skip
        else:
            low, high = _measure_tile(
                weights, widest, source, header_bytes, stride, start, block, local, left, rows, rows_mask,
                VERSIONS, WIDEST, AHEAD, ALIGNED, True,
            )  # fmt: skip
        smallest, largest = tl.minimum(smallest, low), tl.maximum(largest, high)
        tile += partials
    pair = pairs + program.to(tl.int64) * 2 + tl.arange(0, 1)
    tl.store(pair, tl.min(smallest, 1))
    tl.store(pair + 1, tl.max(largest, 1))


@triton.jit(do_not_specialize=["ranges", "tiles", "partials"])
def sum_pieces(
    source, pairs, out, elements, block, ranges, tiles, partials, header_bytes, stride, factor,
    VERSIONS: tl.constexpr, WIDEST: tl.constexpr, AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr, PARTIALS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Long ranges, second step, with the pairs of the first, at most PARTIALS of each range. One program per tile."""
    program = tl.program_id(0)
    tile = program % tiles
    row = program // tiles
    rows = row + tl.arange(0, 1)
    rows_mask = rows < ranges
    pairs += row.to(tl.int64) * partials * 2
    start, local, left, full = words_at(row, tile, block, elements, 1, COLUMNS, ALIGNED)
    if ALIGNED and full:
        _sum_tile(
            source, pairs, partials, out, header_bytes, stride, factor, start, block, local, left, rows, rows_mask,
            tile == 0, VERSIONS, WIDEST, AHEAD, PARTIALS, ALIGNED, False,
        )  # fmt: skip
    else:
        _sum_tile(
            source, pairs, partials, out, header_bytes, stride, factor, start, block, local, left, rows, rows_mask,
            tile == 0, VERSIONS, WIDEST, AHEAD, PARTIALS, ALIGNED, True,
        )  # fmt: skip
    if (tile == 0) & (row + 1 == ranges):
        store_padding(out, elements, ranges, header_bytes, stride)
