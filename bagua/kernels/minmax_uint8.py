"""MinMaxUInt8: tensors as a byte per element, with the smallest and the largest element of every range.

Each range of `block_elements` elements (the last of a chunk may have fewer) is stored as its minimum and maximum in
fp32 and a byte per element, which numbers one of 256 evenly spaced levels; a decoded element differs from the original
by at most half a level, (max - min) / 510, and the rounding of fp32. docs/design/compression.md has the formula, the
bytes and the accuracy; bagua.kernels.minmax_uint8_reference is the formula in torch operations.

Which code runs depends on the device alone, and all of it gives the same bytes:
- CPU: the compiled module bagua.kernels._minmax_uint8; where a source tree has none, the reference, silently.
- CUDA: Triton kernels (bagua.kernels.minmax_uint8_triton) on the caller's current stream, which do not wait for the
  device; without Triton the reference, with a warning.
- any other device: the reference.

Functions may be called by several threads at once. No gradients flow through them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Protocol, cast

from torch import Tensor

from bagua.kernels.argument_checks import (
    FLOAT_DTYPES,
    bytes_to_write,
    check_bytes,
    check_vector,
    elements_of_chunks,
    rows_of,
)
from bagua.kernels.minmax_uint8_layout import ChunkLayout, chunk_layout
from bagua.kernels.minmax_uint8_triton_launch import has_triton

__all__ = ["BLOCK_ELEMENTS", "compress", "compressed_bytes", "decompress", "decompress_reduce_compress"]

BLOCK_ELEMENTS = 1024
"""Elements that share a range unless the caller says otherwise; docs/design/compression.md says why this many."""


class _Implementation(Protocol):
    """What minmax_uint8_{reference,native,triton} define, as in minmax_uint8_reference. The tensors that hold elements
    are as the caller gave them, flat: a view takes as long as all checks."""

    def compress(self, source: Tensor, layout: ChunkLayout, out: Tensor) -> None: ...
    def decompress(self, compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout) -> None: ...
    def decompress_reduce_compress(self, received: Tensor, average: bool, layout: ChunkLayout, out: Tensor) -> None: ...


def compressed_bytes(elements: int, block_elements: int | None = BLOCK_ELEMENTS) -> int:
    """The bytes of one compressed chunk of `elements` elements, a multiple of 32; `block_elements` None: one range.

    Raises:
        ValueError: a number is negative, or the block is empty.
    """
    return chunk_layout(elements, block_elements).total_bytes


def compress(
    source: Tensor, chunks: int = 1, out: Tensor | None = None, block_elements: int | None = BLOCK_ELEMENTS
) -> Tensor:
    """`source`, cut into `chunks` equal chunks, as uint8 [chunks, compressed_bytes(elements of a chunk)].

    Args:
        source: 1-D, contiguous, fp32, fp16 or bf16, its number of elements a multiple of `chunks`; it may be empty. A
            range with an element that is not finite decodes to NaN in all its elements.
        chunks: how many; ranges do not cross chunks.
        out: where to write the result; every byte of it is written. It must not overlap `source`.
        block_elements: how many elements share a range; None: all of a chunk.

    Raises:
        TypeError: an argument is no tensor, or of a dtype that is not supported.
        ValueError: a shape, size, layout or device does not fit.
    """
    check_vector("source", source, FLOAT_DTYPES)
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; give 1 or more")
    layout = chunk_layout(elements_of_chunks("source", source, chunks), block_elements)
    out = bytes_to_write("out", out, (chunks, layout.total_bytes), source.device)
    _implementation_for(source).compress(source, layout, out)
    return out


def decompress(
    compressed: Tensor, target: Tensor, accumulate: bool = False, block_elements: int | None = BLOCK_ELEMENTS
) -> Tensor:
    """Writes what `compress` made into `target`, or adds it to `target`, and returns `target`.

    Args:
        compressed: uint8 [chunks, compressed_bytes(elements of a chunk)], contiguous, from any of the dtypes.
        target: 1-D, contiguous, fp32, fp16 or bf16, chunks * elements of a chunk. A decoded element lies between the
            minimum and the maximum of its range, so that what came from a dtype fits into it again.
        accumulate: add in fp32, then round to the dtype of `target`.
        block_elements: as given to `compress`.

    Raises:
        TypeError: an argument is no tensor, or of a dtype that is not supported.
        ValueError: a shape, size, layout or device does not fit.
    """
    check_vector("target", target, FLOAT_DTYPES)
    chunks = rows_of("compressed", compressed)
    layout = chunk_layout(elements_of_chunks("target", target, chunks, may_be_padded=False), block_elements)
    check_bytes("compressed", compressed, (chunks, layout.total_bytes), target.device)
    _implementation_for(target).decompress(compressed, target, accumulate, layout)
    return target


def decompress_reduce_compress(
    received: Tensor,
    elements: int,
    average: bool,
    out: Tensor | None = None,
    block_elements: int | None = BLOCK_ELEMENTS,
) -> Tensor:
    """n versions of one chunk -> their sum, compressed again: uint8 [compressed_bytes(elements)].

    The levels of the versions are added as integers, weighted by how wide their ranges are: each version adds at most
    two parts of a level of the widest one to the error, of which that has 128, with 3 or 4 versions 64, with 5 to 8
    versions 32. The bits depend on the versions and their order alone. A range which is NaN in one version, or
    whose sum is not finite, becomes NaN.

    Args:
        received: uint8 [n, compressed_bytes(elements)], contiguous, n at least 1: what n ranks made of their chunks.
        elements: of the chunk.
        average: multiply the sum by 1 / n.
        out: where to write the result; every byte of it is written. It must not overlap `received`.
        block_elements: as given to `compress`, and used for the result.

    Raises:
        TypeError: an argument is no tensor, or not of uint8.
        ValueError: a shape, size, layout or device does not fit.
    """
    layout = chunk_layout(elements, block_elements)
    versions = rows_of("received", received)
    check_bytes("received", received, (versions, layout.total_bytes), received.device)
    out = bytes_to_write("out", out, (layout.total_bytes,), received.device)
    _implementation_for(received).decompress_reduce_compress(received, average, layout, out)
    return out


def _implementation_for(tensor: Tensor) -> _Implementation:
    # To make the string that is a device's type takes a tenth of a launch.
    return _implementation("cuda" if tensor.is_cuda else tensor.device.type)


@functools.cache
def _implementation(device_type: str) -> _Implementation:
    if device_type == "cpu" and importlib.util.find_spec("bagua.kernels._minmax_uint8"):
        return _module("minmax_uint8_native")
    if device_type == "cuda" and has_triton():
        return _module("minmax_uint8_triton")
    return _module("minmax_uint8_reference")


def _module(name: str) -> _Implementation:
    return cast("_Implementation", importlib.import_module(f"bagua.kernels.{name}"))
