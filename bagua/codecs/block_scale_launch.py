"""Launches the Triton kernels of codecs with block scales on the caller's current stream.

Each operation is one kernel, which reads and writes everything once and waits for nothing. What is launched for a
layout is computed once. With TRITON_INTERPRET=1 set before the import, the kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from bagua.codecs import block_scale_triton
from bagua.codecs.block_scale import BlockLayout, BlockScaleCodec
from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch

# Elements of a tile, and warps (32 threads each) of a program.
TILE_ELEMENTS, WARPS = 1024, 1
# Devices that convert fp8 by an instruction.
FP8_CAPABILITY = (8, 9)


def compress(codec: BlockScaleCodec, source: Tensor, elements: int, out: Tensor) -> None:
    """As PortableCodec.compress_in_torch."""
    hardware = _hardware(codec, source.get_device())
    layout = codec.layout(elements)
    _compress(codec.kernels_module, layout, codec.unit, out.shape[0], source.dtype, hardware)(source, out)


def decompress(codec: BlockScaleCodec, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
    """As PortableCodec.decompress_in_torch."""
    hardware = _hardware(codec, target.get_device())
    layout = codec.layout(elements)
    launch = _decompress(codec.kernels_module, layout, compressed.shape[0], target.dtype, accumulate, hardware)
    launch(compressed, target)


def decompress_reduce_compress(
    codec: BlockScaleCodec, received: Tensor, elements: int, average: bool, out: Tensor
) -> None:
    """As PortableCodec.sum_in_torch."""
    hardware = _hardware(codec, out.get_device())
    launch = _sum(codec.kernels_module, codec.layout(elements), codec.unit, received.shape[0], average, hardware)
    launch(received, out)


def _hardware(codec: BlockScaleCodec, device: int) -> bool:
    """Whether the device converts the codes."""
    return codec.has_fp8_codes and converts_fp8(device)


@functools.cache
def converts_fp8(device: int) -> bool:
    """Whether the device has an instruction for it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


@functools.cache
def _module(kernels: str) -> ModuleType:
    return importlib.import_module(f"bagua.codecs.{kernels}")


def _tiling(layout: BlockLayout) -> tuple[int, int, dict[str, int | None]]:
    """(blocks of a tile, tiles of a chunk, options)."""
    rows = min(TILE_ELEMENTS // layout.block, 1 << (layout.blocks - 1).bit_length())
    return rows, -(-layout.blocks // rows), {"num_warps": WARPS, "enable_fp_fusion": False}


@functools.lru_cache(maxsize=4096)
def _compress(
    kernels: str,
    layout: BlockLayout,
    unit: float,
    chunks: int,
    dtype: torch.dtype,  # noqa: ARG001 (in the key)
    hardware: bool,
) -> KernelLaunch:
    rows, groups, options = _tiling(layout)
    arguments = (layout.elements, layout.blocks, groups, layout.header_bytes, layout.total_bytes)
    constants = {
        "TILE": _module(kernels).compress_tile,
        "BLOCK": layout.block,
        "PAYLOAD": layout.payload,
        "ROWS": rows,
        "UNIT": unit,
        "HARDWARE": hardware,
    }
    return KernelLaunch(block_scale_triton.compress_blocks, (groups * chunks,), arguments, constants, options)


@functools.lru_cache(maxsize=4096)
def _decompress(
    kernels: str,
    layout: BlockLayout,
    chunks: int,
    dtype: torch.dtype,  # noqa: ARG001 (in the key)
    accumulate: bool,
    hardware: bool,
) -> KernelLaunch:
    rows, groups, options = _tiling(layout)
    arguments = (layout.elements, layout.blocks, groups, layout.header_bytes, layout.total_bytes)
    constants = {
        "TILE": _module(kernels).decompress_tile,
        "BLOCK": layout.block,
        "ROWS": rows,
        "ACCUMULATE": accumulate,
        "HARDWARE": hardware,
    }
    return KernelLaunch(block_scale_triton.decompress_blocks, (groups * chunks,), arguments, constants, options)


@functools.lru_cache(maxsize=4096)
def _sum(kernels: str, layout: BlockLayout, unit: float, versions: int, average: bool, hardware: bool) -> KernelLaunch:
    rows, groups, options = _tiling(layout)
    arguments = (layout.blocks, layout.header_bytes, layout.total_bytes, 1.0 / versions if average else 1.0)
    constants = {
        "TILE": _module(kernels).sum_tile,
        "PAYLOAD": layout.payload,
        "ROWS": rows,
        "UNIT": unit,
        "VERSIONS": versions,
        "HARDWARE": hardware,
    }
    return KernelLaunch(block_scale_triton.sum_blocks, (groups,), arguments, constants, options)
