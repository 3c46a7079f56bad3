"""The device code of sums of MinMaxUInt8: Triton kernels that bagua.kernels.minmax_uint8_triton launches.

They are to be compiled, and take arguments, as those of bagua.kernels.minmax_uint8_triton_kernels.
bagua.kernels.minmax_uint8_reference has the formula and its words. `source` has VERSIONS versions of one chunk,
`stride` bytes after each other, whose sum times `factor` is meant. The words of the first AHEAD versions, if there are
not many versions, are loaded before anything is computed.

What a version adds for an element is ((byte - 128) * w + 64) >> 7. Integers take four instructions for it, most of
them for units that are half as wide as those for floats. Here it takes two. A byte becomes the number 2^15 + byte, of
which the bits are 47 00 byte 00, and a fused multiply-add of floats adds

    (2^15 + byte) * (w / 128 + 2^-15) = 256 * w + 1 + byte * w / 128 + byte * 2^-15

to a sum that is an integer. If the result is from 2^23 to 2^24, it is rounded to the nearest integer. The last term,
less than 1 / 128, makes more than a half of a half, and changes nothing else: of byte * w / 128 remains
(byte * w + 64) >> 7, which is w + (((byte - 128) * w + 64) >> 7). So a sum begins with ORIGIN less the 257 * w + 1 of
its versions, and ends with ORIGIN + a, whose bits, as an integer, are ORIGIN_BITS + a: nothing is to be converted.

That holds for a chain of 8 versions, of which the first result is less than ORIGIN by up to 7 * (257 * 2^12 + 1). What
a version of more than 8 adds is found alone, and added as an integer. `sums` are these integers, ORIGIN_BITS + a or a:
all that is made of them is made of differences.

A tile, ROWS ranges by COLUMNS elements, is held as four tensors [ROWS, COLUMNS // 4]: the first elements of words of
four, the second, the third and the fourth, so that words need not be put in another order. MASKED: not all of the tile
may be elements, but `left` from the first of each word on. ALIGNED: tiles begin at multiples of 16 elements, and words
are read and written, the last of a chunk with some of its padding; otherwise bytes, MASKED.

Up to CHAIN versions are weighed first, and their sum is a chain of multiply-adds; of more the weights are found in a
loop that adds, as registers would not hold them. WIDEST is the weight of the widest. Work for a range is repeated by
every thread of the warp, so it is kept short.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="assignment, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_tiles import (
    INTEGERS,
    INTERPRETED,
    UNITS_PER_LEVEL,
    canonical,
    closest_to_zero,
    load,
    load_ends,
    rint,
    scale_and_top,
    store,
    store_ends,
    store_padding,
)

# Versions that one chain of multiply-adds has at most.
CHAIN = tl.constexpr(8)
# 2^24 - 2^17, and its bits.
ORIGIN = tl.constexpr(16646144.0)
ORIGIN_BITS = tl.constexpr(0x4B7E0000)
# 2^15, with a byte in the third byte of its bits 2^15 + byte.
NUMBER = tl.constexpr(32768.0)
NUMBER_BITS = tl.constexpr(0x47000000)
# 2^-15
ROUND_UP = tl.constexpr(0.000030517578125)
# From here to twice as much, fp32 has the multiples of 1 / 128: 2^16.
WEIGHTS = tl.constexpr(65536.0)
# The smallest half of a range that has levels: 127.5 divided by a smaller one is infinite.
NARROWEST = tl.constexpr(3.7468884674537957e-37)
# 128 * 255 * 2^16
ALL_PARTS = tl.constexpr(2139095040.0)


@triton.jit
def half_of(lowest, highest):
    """Of ranges; 0 if there is but one level."""
    half = highest * 0.5 - lowest * 0.5
    return tl.where(half >= NARROWEST, half, 0.0)


@triton.jit
def weight_of(half, widest, WIDEST: tl.constexpr):
    """w / 128, by `half_of` a version and the widest, at least NARROWEST; it is WIDEST / 128 for the widest."""
    scale = tl.div_rn(tl.full(widest.shape, 127.5, tl.float32), widest)
    weight = (half * scale) * (WIDEST / 127.5 / 128.0)
    return (weight + WEIGHTS) - WEIGHTS


@triton.jit
def zero_of(lowest, highest, half):
    """(2^15 + zero, what it stands for) of a version. The number is any, if it has no weight."""
    has_levels = half > 0.0
    scale = tl.where(has_levels, tl.div_rn(tl.full(half.shape, 127.5, tl.float32), half), 0.0)
    bias = tl.full(half.shape, INTEGERS + 255.0, tl.float32) - rint(highest * scale)
    zero = tl.minimum(tl.maximum(bias, INTEGERS), INTEGERS + 255.0)
    part = (zero - bias) * (half * UNITS_PER_LEVEL)
    return zero - (INTEGERS - NUMBER), tl.where(has_levels, part, closest_to_zero(lowest, highest))


@triton.jit
def start_of(weight, COUNT: tl.constexpr):
    """With what the sum of COUNT versions begins, by the sum of their weights."""
    return tl.full(weight.shape, ORIGIN - COUNT, tl.float32) - weight * (257.0 * 128.0)


@triton.jit
def added(numbers, weight, sums):
    """`sums` and what a version with these numbers, 2^15 + byte, adds to them."""
    factor = weight + ROUND_UP
    if INTERPRETED:  # its multiply-add rounds twice
        exact = numbers.to(tl.float64) * factor.to(tl.float64) + sums.to(tl.float64)
        sums = exact.to(tl.float32)
    else:
        sums = tl.fma(numbers, tl.broadcast_to(factor, numbers.shape), tl.broadcast_to(sums, numbers.shape))
    return sums


@triton.jit
def added_alone(numbers, weight, sums):
    """The same of integers, for any number of versions."""
    return sums + (bits_of(added(numbers, weight, start_of(weight, 1))) - ORIGIN_BITS)


@triton.jit
def bits_of(numbers):
    return numbers.to(tl.int32, bitcast=True)


@triton.jit
def number_of(level):
    """2^15 + byte."""
    return ((level.to(tl.int32) << 8) | NUMBER_BITS).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of_words(words):
    """2^15 + byte of the first to the fourth bytes of words, by one instruction for each."""
    if INTERPRETED:
        first, second = number_of(words & 0xFF), number_of((words >> 8) & 0xFF)
        third, fourth = number_of((words >> 16) & 0xFF), number_of((words >> 24) & 0xFF)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x47000000, 0x7404; prmt.b32 $1, $4, 0x47000000, 0x7414;"
            "prmt.b32 $2, $4, 0x47000000, 0x7424; prmt.b32 $3, $4, 0x47000000, 0x7434;",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return first, second, third, fourth


@triton.jit
def words_of_highest_bytes(first, second, third, fourth):
    """Words of the highest bytes of four integers."""
    if INTERPRETED:
        low = ((first >> 24) & 0xFF) | ((second >> 16) & 0xFF00)
        words = low | ((third >> 8) & 0xFF0000) | (fourth & -0x1000000)
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0073; prmt.b32 high, $3, $4, 0x7300;"
            "prmt.b32 $0, low, high, 0x7610; }",
            "=r,r,r,r,r",
            [first, second, third, fourth],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def range_of_sum(base, zero, widest, smallest, largest, factor, WIDEST: tl.constexpr):
    """(lowest, highest, scale, rint(highest * scale)) of the result, by `half_of` the widest version."""
    step = widest * UNITS_PER_LEVEL
    lowest = (base + (smallest - zero).to(tl.float32) * (128.0 / WIDEST) * step) * factor
    highest = (base + (largest - zero).to(tl.float32) * (128.0 / WIDEST) * step) * factor
    lowest, highest = canonical(lowest, highest)
    scale, top = scale_and_top(lowest, highest)
    return lowest, highest, scale, top


@triton.jit
def requantization(lowest, scale, top, smallest, largest, VERSIONS: tl.constexpr):
    """(times, plus, right) of ranges: the results are the highest bytes of ((sum - smallest) >> right) * times + plus,
    modulo 2^32; of up to CHAIN versions those of sum * times + plus.
    """
    spread = tl.maximum(largest - smallest, 1)
    number = spread.to(tl.float32)
    # So many bits to the left, and the spread has 16.
    left = 142 - (bits_of(number) >> 23)
    right = tl.zeros_like(left)
    if VERSIONS <= CHAIN:
        number = ((bits_of(number) & 0x7FFFFF) | NUMBER_BITS).to(tl.float32, bitcast=True)
    else:
        right = tl.maximum(0 - left, 0)
        left = tl.maximum(left, 0)
        number = ((spread << left) >> right).to(tl.float32)
    times = tl.div_rn(tl.full(number.shape, ALL_PARTS, tl.float32), number).to(tl.int32)
    plus = (lowest * scale + (255.0 - top)) * 128.0 + 65.0
    plus = tl.minimum(tl.maximum(plus, 0.0), 127.0).to(tl.int32)
    # A bit more than the formula's, which has the result in bits 23 to 30. One level: 255. Not finite: 0.
    times = tl.where(scale == 0.0, 0, times << (left + 1))
    plus = tl.where(scale == 0.0, tl.where(lowest == lowest, -0x1000000, 0), plus << 17)
    if VERSIONS <= CHAIN:
        plus = tl.sub(plus, tl.mul(smallest, times, sanitize_overflow=False), sanitize_overflow=False)
    return times, plus, right


@triton.jit
def requantized(sums, smallest, times, plus, right, VERSIONS: tl.constexpr):
    """Integers whose highest bytes are the results, by `requantization`."""
    if VERSIONS > CHAIN:
        sums = (sums - smallest[:, None]) >> right[:, None]
    return tl.add(tl.mul(sums, times[:, None], sanitize_overflow=False), plus[:, None], sanitize_overflow=False)


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
