"""The Triton kernels of fp8_e4m3. HARDWARE: the device converts fp8 by itself (from 8.9 on); elsewhere integer
arithmetic gives the same bits."""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.codecs.block_scale_triton import load_scales, scale_of, store_scales
from bagua.kernels.minmax_uint8_triton_tiles import larger, load, store

BLOCK = tl.constexpr(128)
PARTS = 1  # of a tile, see fused_triton
# 2^14, where the last place of fp32 is that of the smallest fp8, and its bits.
SMALL = tl.constexpr(16384.0)
SMALL_BITS = tl.constexpr(0x46800000)


@triton.jit
def codes_of(values, HARDWARE: tl.constexpr):
    """fp32 of at most 463 -> bytes, rounded half to even."""
    if HARDWARE:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # The exponent has another bias, 7 in place of 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = (tl.abs(values) + SMALL).to(tl.int32, bitcast=True) - SMALL_BITS
        codes = (tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def numbers_of(codes, HARDWARE: tl.constexpr):
    """Bytes -> fp32."""
    if HARDWARE:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Sign, exponent and mantissa to where fp32 has them; then the bias of the exponent.
        bits = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000
        numbers = bits.to(tl.float32, bitcast=True) * (2.0**120)
    return numbers


@triton.jit
def _local(ROWS: tl.constexpr):
    """Elements of a tile, [ROWS, BLOCK]."""
    return tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _write(values, chunk_at, header_bytes, start, local, rows, rows_mask, UNIT: tl.constexpr,
           HARDWARE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """fp32 [ROWS, BLOCK] -> codes and scales."""
    largest = tl.reduce(tl.abs(values), 1, larger)
    finite, inverse, bits = scale_of(largest, UNIT)
    codes = tl.where(finite[:, None], codes_of(values * inverse[:, None], HARDWARE), 0).to(tl.uint8)
    store(chunk_at + header_bytes + start + local, codes, rows_mask[:, None], MASKED)
    store_scales(chunk_at, rows, bits, rows_mask, MASKED)


@triton.jit
def compress_tile(
    values_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS: tl.constexpr, UNIT: tl.constexpr,
    HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    local = _local(ROWS)
    values = load(values_at + local, local < left, MASKED).to(tl.float32)
    _write(values, chunk_at, header_bytes, row.to(tl.int64) * BLOCK, local, rows, rows_mask, UNIT, HARDWARE, MASKED)


@triton.jit
def decompress_tile(
    target_at, left, chunk_at, header_bytes, row, rows, rows_mask, ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
    HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    local = _local(ROWS)
    scales = load_scales(chunk_at, rows, rows_mask, MASKED)
    codes = load(chunk_at + header_bytes + row.to(tl.int64) * BLOCK + local, rows_mask[:, None], MASKED)
    values = numbers_of(codes, HARDWARE) * scales[:, None]
    pointers = target_at + local
    if ACCUMULATE:
        values = load(pointers, local < left, MASKED).to(tl.float32) + values
    store(pointers, values.to(pointers.dtype.element_ty), local < left, MASKED)


@triton.jit
def offsets(ROWS: tl.constexpr, BITS: tl.constexpr):  # noqa: ARG001
    return (_local(ROWS),)


@triton.jit
def decoded(chunk_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS: tl.constexpr,  # noqa: ARG001
            HARDWARE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    scales = load_scales(chunk_at, rows, rows_mask, MASKED)
    codes_at = chunk_at + header_bytes + row.to(tl.int64) * BLOCK
    codes = load(codes_at + offsets[0], rows_mask[:, None], MASKED)
    return (numbers_of(codes, HARDWARE) * scales[:, None],)


@triton.jit
def sum_tile(
    received, out, factor, header_bytes, stride, row, rows, rows_mask,
    ROWS: tl.constexpr, UNIT: tl.constexpr, VERSIONS: tl.constexpr, HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    local = _local(ROWS)
    start = row.to(tl.int64) * BLOCK
    codes_at = received + (header_bytes + start)
    total = tl.zeros(local.shape, tl.float32)
    if VERSIONS <= 4:
        # All are on their way before the first is added.
        scales = ()
        codes = ()
        for _ in tl.static_range(VERSIONS):
            scales = scales + (load_scales(received, rows, rows_mask, MASKED),)
            codes = codes + (load(codes_at + local, rows_mask[:, None], MASKED),)
            received += stride
            codes_at += stride
        for version in tl.static_range(VERSIONS):
            total = tl.fma(numbers_of(codes[version], HARDWARE), tl.broadcast_to(scales[version][:, None], local.shape),
                           total)  # fmt: skip
    else:
        next_scales = load_scales(received, rows, rows_mask, MASKED)
        next_codes = load(codes_at + local, rows_mask[:, None], MASKED)
        for _ in tl.range(1, VERSIONS):
            received += stride
            codes_at += stride
            one_scales, one_codes = next_scales, next_codes
            next_scales = load_scales(received, rows, rows_mask, MASKED)
            next_codes = load(codes_at + local, rows_mask[:, None], MASKED)
            total = tl.fma(numbers_of(one_codes, HARDWARE), tl.broadcast_to(one_scales[:, None], local.shape), total)
        total = tl.fma(numbers_of(next_codes, HARDWARE), tl.broadcast_to(next_scales[:, None], local.shape), total)
    _write(total * factor, out, header_bytes, start, local, rows, rows_mask, UNIT, HARDWARE, MASKED)
