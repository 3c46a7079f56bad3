"""The Triton kernels of codecs with block scales: one for each operation, which goes through a codec's tiles.

A codec's module has `compress_tile`, `decompress_tile` and `sum_tile`, with the arguments with which they are called
here. bagua.codecs.block_scale has the formula and its words. Kernels are compiled without the contraction of
multiplications and additions (enable_fp_fusion=False); where they ask for one, the product is exact. A tile is ROWS
blocks. MASKED: not all of it may be elements. HARDWARE: the device converts the codes. Offsets have 64 bits.

An integer argument that is 1 may be a number of Python's when a kernel is compiled, which has no methods.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_tiles import load, store

SMALLEST_SCALE = tl.constexpr(2.0**-126)
NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def scale_of(largest, UNIT: tl.constexpr):
    """Largest absolute values [ROWS] -> (whether all is finite, 1 / scale, bits of the scale)."""
    scale = ((largest * UNIT).to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)
    scale = tl.where(scale >= SMALLEST_SCALE, scale, 0.0)
    finite = largest < float("inf")
    inverse = tl.where(scale > 0.0, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), 0.0)
    return finite, inverse, tl.where(finite, scale.to(tl.int32, bitcast=True) >> 16, NAN_BITS)


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


@triton.jit
def compress_blocks(
    source, out, elements, blocks, groups, header_bytes, stride, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PAYLOAD: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """One program for each tile, of which TILE is the codec's function."""
    program = tl.program_id(0)
    row = program % groups * ROWS
    chunk = (program // groups).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < blocks
    start = row.to(tl.int64) * BLOCK
    values_at = source + (chunk * elements + start)
    chunk_at = out + chunk * stride
    left = elements - start
    if left >= ROWS * BLOCK:
        TILE(values_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS, UNIT, HARDWARE, False)
    else:
        TILE(values_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS, UNIT, HARDWARE, True)
    if row + ROWS >= blocks:
        store_padding(chunk_at, blocks, header_bytes, stride, PAYLOAD)


@triton.jit
def decompress_blocks(
    compressed, target, elements, blocks, groups, header_bytes, stride, TILE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """As compress_blocks."""
    program = tl.program_id(0)
    row = program % groups * ROWS
    chunk = (program // groups).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < blocks
    start = row.to(tl.int64) * BLOCK
    target_at = target + (chunk * elements + start)
    chunk_at = compressed + chunk * stride
    left = elements - start
    if left >= ROWS * BLOCK:
        TILE(target_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS, ACCUMULATE, HARDWARE, False)
    else:
        TILE(target_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS, ACCUMULATE, HARDWARE, True)


@triton.jit
def sum_blocks(
    received, out, blocks, header_bytes, stride, factor, TILE: tl.constexpr, PAYLOAD: tl.constexpr,
    ROWS: tl.constexpr, UNIT: tl.constexpr, VERSIONS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Versions of one chunk -> their sum times `factor`. As compress_blocks."""
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < blocks
    if row + ROWS <= blocks:
        TILE(received, out, factor, header_bytes, stride, row, rows, rows_mask, ROWS, UNIT, VERSIONS, HARDWARE, False)
    else:
        TILE(received, out, factor, header_bytes, stride, row, rows, rows_mask, ROWS, UNIT, VERSIONS, HARDWARE, True)
    if row + ROWS >= blocks:
        store_padding(out, blocks, header_bytes, stride, PAYLOAD)
