"""Launches the kernels of bagua.codecs.fused on the caller's current stream.

The arguments were checked there. Bytes that do not lie at a multiple of 16 go through a copy that does. With
TRITON_INTERPRET=1 set before the import, the kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua.codecs import fused_triton
from bagua.codecs.block_scale_launch import converts_fp8
from bagua.codecs.codec import Codec
from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch, aligned, aligned_like

# Elements of a tile: a range of int8 (fused_triton.RANGE).
TILE_ELEMENTS = 1024
# By measurement on an H200: a program is one warp (32 threads), or two where fp32 elements lie in two parts and are
# measured before they are written.
_OPTIONS: dict[str, int | None] = {"num_warps": 1, "enable_fp_fusion": False}
_OPTIONS_OF_PARTED_REST: dict[str, int | None] = {**_OPTIONS, "num_warps": 2, "maxnreg": 48}


@dataclass(frozen=True)
class _Tiling:
    """How tiles cover chunks of one codec."""

    blocks: int
    """Of a chunk."""
    rows: int
    """Blocks of a tile."""
    header_bytes: int
    total_bytes: int
    """Of a compressed chunk."""
    constants: dict[str, Any]

    @property
    def groups(self) -> int:
        """Tiles of a chunk."""
        return -(-self.blocks // self.rows)


def _tiling(codec: Codec, elements: int, device: int) -> _Tiling:
    assert codec.tiles_module is not None, "checked by the caller"
    module = importlib.import_module(codec.tiles_module)
    block = module.BLOCK.value
    blocks, rows = -(-elements // block), TILE_ELEMENTS // block
    constants = {
        "OFFSETS": module.offsets,
        "DECODED": module.decoded,
        "PARTS": module.PARTS,
        "BLOCK": block,
        "ROWS": rows,
        "HARDWARE": codec.has_fp8_codes and converts_fp8(device),
    }
    return _Tiling(blocks, rows, codec.header_bytes(elements), codec.compressed_bytes(elements), constants)


def decompress_reduce(codec: Codec, received: Tensor, own: Tensor, position: int, factor: float, out: Tensor) -> None:
    """As bagua.codecs.fused.decompress_reduce."""
    types = (own.dtype, out.dtype)
    launch = _reduce(codec, out.numel(), len(received), position, factor, types, out.get_device())
    launch(aligned(received), own, out)


def compress_rest(codec: Codec, values: Tensor, sent: Tensor, exact: int, stored: Codec, out: Tensor) -> None:
    """As bagua.codecs.fused.compress_rest."""
    chunks = len(sent)
    launch = _rest(codec, stored, values.numel() // chunks, chunks, exact, values.dtype, values.get_device())
    result = aligned_like(out)
    launch(values, aligned(sent), result)
    if result is not out:
        out.copy_(result)


def add_differences(codec: Codec, differences: Tensor, reference: Tensor, out: Tensor) -> None:
    """As bagua.codecs.fused.add_differences."""
    chunks = len(differences)
    launch = _add(codec, reference.numel() // chunks, chunks, reference.dtype, reference.get_device())
    launch(aligned(differences), reference, out)


@functools.lru_cache(maxsize=4096)
def _reduce(
    codec: Codec,
    elements: int,
    versions: int,
    position: int,
    factor: float,
    types: tuple[torch.dtype, torch.dtype],  # noqa: ARG001 (in the key)
    device: int,
) -> KernelLaunch:
    tiling = _tiling(codec, elements, device)
    arguments = (elements, tiling.blocks, tiling.header_bytes, tiling.total_bytes, factor)
    constants = {**tiling.constants, "VERSIONS": versions, "POSITION": position}
    return KernelLaunch(fused_triton.reduce_tiles, (tiling.groups,), arguments, constants, _OPTIONS)


@functools.lru_cache(maxsize=4096)
def _rest(
    codec: Codec,
    stored: Codec,
    elements: int,
    chunks: int,
    exact: int,
    dtype: torch.dtype,
    device: int,
) -> KernelLaunch:
    tiling = _tiling(codec, elements, device)
    sizes = (stored.header_bytes(elements), stored.compressed_bytes(elements))
    arguments = (elements, tiling.blocks, tiling.groups, chunks, exact, tiling.header_bytes, tiling.total_bytes, *sizes)
    grid = (tiling.groups * max(chunks - 1, 1),)
    is_parted = tiling.constants["PARTS"] > 1 and dtype == torch.float32
    options = _OPTIONS_OF_PARTED_REST if is_parted else _OPTIONS
    return KernelLaunch(fused_triton.rest_ranges, grid, arguments, tiling.constants, options)


@functools.lru_cache(maxsize=4096)
def _add(
    codec: Codec,
    elements: int,
    chunks: int,
    dtype: torch.dtype,  # noqa: ARG001 (in the key)
    device: int,
) -> KernelLaunch:
    tiling = _tiling(codec, elements, device)
    arguments = (elements, tiling.blocks, tiling.groups, tiling.header_bytes, tiling.total_bytes)
    grid = (tiling.groups * chunks,)
    return KernelLaunch(fused_triton.differences_tiles, grid, arguments, tiling.constants, _OPTIONS)
