"""The formula of MinMaxUInt8 in device code, for rows of elements that have a range each; for the kernels of
bagua.kernels.minmax_uint8_triton_kernels, which say how they are to be compiled.

Rows are [ROWS, COLUMNS], what belongs to a range is [ROWS]; numbers are fp32. bagua.kernels.minmax_uint8_reference has
the formula and its words.
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
