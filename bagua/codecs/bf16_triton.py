"""The Triton kernels of bf16, and their launches on the caller's current stream: one for each operation.

Bits are rounded as integers, so that NaN has the bits of bagua.codecs.bf16.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from bagua.kernels.minmax_uint8_layout import padded
from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch
from bagua.kernels.minmax_uint8_triton_tiles import load

TILE, WARPS = 1024, 1
BLOCK = tl.constexpr(1024)  # of a tile, see fused_triton: a range of int8
PARTS = 1
LARGEST_HALF = tl.constexpr(65280.0)


@triton.jit
def _bits_of(values):
    """fp32 -> int16, half to even."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _number_of(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def compress_tiles(source, out, elements, row, groups, TILE: tl.constexpr, IS_HALF: tl.constexpr):
    """`row`: 16-bit numbers of a compressed chunk, its padding included."""
    program = tl.program_id(0)
    chunk = (program // groups).to(tl.int64)
    at = (program % groups).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(source + chunk * elements + at, mask=at < elements, other=0).to(tl.float32)
    if IS_HALF:
        limited = tl.minimum(tl.maximum(values, -LARGEST_HALF), LARGEST_HALF)
        values = tl.where(tl.abs(values) < float("inf"), limited, values)
    tl.store(out.to(tl.pointer_type(tl.int16)) + chunk * row + at, _bits_of(values), mask=at < row)


@triton.jit
def decompress_tiles(compressed, target, elements, row, groups, TILE: tl.constexpr, ACCUMULATE: tl.constexpr):
    program = tl.program_id(0)
    chunk = (program // groups).to(tl.int64)
    at = (program % groups).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < elements
    bits = tl.load(compressed.to(tl.pointer_type(tl.int16)) + chunk * row + at, mask=mask, other=0)
    values = _number_of(bits)
    pointers = target + chunk * elements + at
    if ACCUMULATE:
        values = tl.load(pointers, mask=mask, other=0).to(tl.float32) + values
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def sum_tiles(received, out, row, factor, TILE: tl.constexpr, VERSIONS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < row
    pointers = received.to(tl.pointer_type(tl.int16)) + at
    total = tl.zeros([TILE], tl.float32)
    for _ in tl.range(VERSIONS):
        total += _number_of(tl.load(pointers, mask=mask, other=0))
        pointers += row
    tl.store(out.to(tl.pointer_type(tl.int16)) + at, _bits_of(total * factor), mask=mask)


@triton.jit
def offsets(ROWS: tl.constexpr, BITS: tl.constexpr):  # noqa: ARG001
    return (tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :],)


@triton.jit
def decoded(chunk_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS: tl.constexpr,  # noqa: ARG001
            HARDWARE: tl.constexpr, MASKED: tl.constexpr):  # noqa: ARG001  # fmt: skip
    bits_at = chunk_at.to(tl.pointer_type(tl.int16)) + row.to(tl.int64) * BLOCK
    return (_number_of(load(bits_at + offsets[0], offsets[0] < left, MASKED)),)


def compress(_codec: object, source: Tensor, elements: int, out: Tensor) -> None:
    """As bagua.codecs.bf16.Bf16.compress_in_torch."""
    _compress(elements, out.shape[0], source.dtype)(source, out)


def decompress(_codec: object, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
    """As bagua.codecs.bf16.Bf16.decompress_in_torch."""
    _decompress(elements, compressed.shape[0], target.dtype, accumulate)(compressed, target)


def decompress_reduce_compress(_codec: object, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
    """As bagua.codecs.bf16.Bf16.sum_in_torch."""
    _sum(elements, received.shape[0], average)(received, out)


_OPTIONS: dict[str, int | None] = {"num_warps": WARPS, "enable_fp_fusion": False}


def _sizes(elements: int) -> tuple[int, int]:
    """(16-bit numbers of a compressed chunk, its tiles)."""
    row = padded(2 * elements) // 2
    return row, -(-row // TILE)


@functools.lru_cache(maxsize=4096)
def _compress(elements: int, chunks: int, dtype: torch.dtype) -> KernelLaunch:
    row, groups = _sizes(elements)
    constants: dict[str, float] = {"TILE": TILE, "IS_HALF": dtype == torch.float16}
    return KernelLaunch(compress_tiles, (groups * chunks,), (elements, row, groups), constants, _OPTIONS)


@functools.lru_cache(maxsize=4096)
def _decompress(elements: int, chunks: int, dtype: torch.dtype, accumulate: bool) -> KernelLaunch:  # noqa: ARG001 (in the key)
    row, groups = _sizes(elements)
    constants: dict[str, float] = {"TILE": TILE, "ACCUMULATE": accumulate}
    return KernelLaunch(decompress_tiles, (groups * chunks,), (elements, row, groups), constants, _OPTIONS)


@functools.lru_cache(maxsize=4096)
def _sum(elements: int, versions: int, average: bool) -> KernelLaunch:
    row, groups = _sizes(elements)
    arguments = (row, 1.0 / versions if average else 1.0)
    return KernelLaunch(sum_tiles, (groups,), arguments, {"TILE": TILE, "VERSIONS": versions}, _OPTIONS)
