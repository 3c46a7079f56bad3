"""What the Triton kernels of codecs with block scales share: the scale, its bytes, and what follows the last block.

bagua.codecs.block_scale has the formula and its words. Kernels are compiled without the contraction of multiplications
and additions (enable_fp_fusion=False); where they ask for one, the product is exact. A tile is ROWS blocks. MASKED: not
all of it may be elements. Offsets have 64 bits.

An integer argument that is 1 may be a number of Python's when a kernel is compiled, which has no methods.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(2.0**-126)
NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest, UNIT: tl.constexpr):
    """Largest absolute values [ROWS] -> (whether all is finite, 1 / scale, bits of the scale)."""
    scale = ((largest * UNIT).to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(scale >= SMALLEST_SCALE, scale, 0.0)
    finite = largest < float("inf")
    inverse = tl.where(scale > 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
    return finite, inverse, tl.where(finite, scale.to(tl.int32, bitcast=True) >> 16, NAN_BITS)


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
def load_scales(chunk_at, rows, rows_mask, MASKED: tl.constexpr):
    bits = load(chunk_at.to(tl.pointer_type(tl.int16)) + rows, rows_mask, MASKED)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def store_scales(chunk_at, rows, bits, rows_mask, MASKED: tl.constexpr):
    store(chunk_at.to(tl.pointer_type(tl.int16)) + rows, bits.to(tl.int16), rows_mask, MASKED)


@triton.jit
def store_padding(chunk_at, blocks, header_bytes, stride, PAYLOAD: tl.constexpr):
    """Zeros between the parts of a compressed chunk and after it."""
    at = tl.arange(0, 32).to(tl.int64)
    zeros = tl.zeros([32], tl.uint8)
    header_end = at + blocks * 2
    tl.store(chunk_at + header_end, zeros, mask=header_end < header_bytes)
    end = at + header_bytes + tl.zeros([32], tl.int64) + blocks * PAYLOAD
    tl.store(chunk_at + end, zeros, mask=end < stride)
