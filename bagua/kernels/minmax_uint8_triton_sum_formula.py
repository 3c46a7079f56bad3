"""The formula of sums of MinMaxUInt8 in device code; for the kernels of bagua.kernels.minmax_uint8_triton_sum_kernels,
which say how they are to be compiled. bagua.kernels.minmax_uint8_reference has the formula and its words.

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
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_formula import (
    INTEGERS,
    INTERPRETED,
    UNITS_PER_LEVEL,
    canonical,
    closest_to_zero,
    rint,
    scale_and_top,
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
