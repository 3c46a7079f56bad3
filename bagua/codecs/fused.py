"""What several operations of a codec would do one after the other, in one pass over memory.

On CUDA each is one kernel (bagua.codecs.fused_launch), which reads and writes every number once. Elsewhere, without
Triton, and for codecs without device code, it is those operations, with the same bits.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from bagua.codecs.codec import Codec
from bagua.codecs.names import get_codec
from bagua.kernels.argument_checks import (
    FLOAT_DTYPES,
    bytes_to_write,
    check_bytes,
    check_vector,
    elements_of_chunks,
    rows_of,
)
from bagua.kernels.minmax_uint8_triton_launch import has_triton

# How `compress_rest` stores.
REST_CODEC = "int8"


def decompress_reduce(codec: Codec, received: Tensor, own: Tensor, position: int, factor: float, out: Tensor) -> Tensor:
    """factor * (the sum of n versions, of which one was not compressed) -> `out`, which is returned.

    The sum is made in fp32, in the order of the versions.

    Args:
        received: uint8 [n, compressed_bytes(elements)], contiguous; row `position` is not read.
        own: [elements], contiguous, of a float dtype: the version at `position`.
        position: 0 to n - 1.
        factor: 1 / n for the mean.
        out: [elements], contiguous, of a float dtype. It must not overlap the others.

    Raises:
        TypeError: an argument is not a tensor, or of a dtype that is not supported.
        ValueError: a shape, size, layout or device does not fit.
    """
    check_vector("own", own, FLOAT_DTYPES)
    check_vector("out", out, FLOAT_DTYPES)
    elements = out.numel()
    if own.numel() != elements:
        raise ValueError(f"own has {own.numel()} elements, and out has {elements}; give as many")
    versions = rows_of("received", received)
    check_bytes("received", received, (versions, codec.compressed_bytes(elements)), out.device)
    if not 0 <= position < versions:
        raise ValueError(f"position is {position}; {versions} versions are 0 to {versions - 1}")
    if not elements:
        return out
    if (kernels := _kernels(codec, out)) is not None:
        kernels.decompress_reduce(codec, received, own, position, factor, out)
        return out
    total = torch.zeros(elements, dtype=torch.float32, device=out.device)
    for version, row in enumerate(received):
        if version == position:
            total.add_(own)
        else:
            codec.decompress(row.unsqueeze(0), total, accumulate=True)
    return out.copy_(total.mul_(factor))


def compress_rest(codec: Codec, values: Tensor, sent: Tensor, exact: int, out: Tensor | None = None) -> Tensor:
    """What compression took from `values`, compressed as int8: `values` minus `sent` decompressed, rounded to the dtype
    of `values`, and 0 where that is not finite.

    Args:
        values: [chunks * elements], contiguous, of a float dtype.
        sent: uint8 [chunks, compressed_bytes(elements)], contiguous: what `codec` made of `values`.
        exact: the chunk that was not sent; nothing was taken from it.
        out: where to write the result; every byte of it is written.

    Returns:
        uint8 [chunks, compressed_bytes(elements) of int8].

    Raises:
        TypeError: an argument is not a tensor, or of a dtype that is not supported.
        ValueError: a shape, size, layout or device does not fit.
    """
    check_vector("values", values, FLOAT_DTYPES)
    chunks = rows_of("sent", sent)
    elements = elements_of_chunks("values", values, chunks)
    if not 0 <= exact < chunks:
        raise ValueError(f"exact is {exact}; {chunks} chunks are 0 to {chunks - 1}")
    check_bytes("sent", sent, (chunks, codec.compressed_bytes(elements)), values.device)
    stored = get_codec(REST_CODEC)
    shape = (chunks, stored.compressed_bytes(elements))
    out = bytes_to_write("out", out, shape, values.device)
    if not elements:
        return out
    if (kernels := _kernels(codec, values)) is not None:
        kernels.compress_rest(codec, values, sent, exact, stored, out)
        return out
    for chunk, (some, code, row) in enumerate(zip(values.view(chunks, -1), sent, out, strict=True)):
        rest = torch.zeros_like(some) if chunk == exact else some.neg()
        if chunk != exact:
            codec.decompress(code.unsqueeze(0), rest, accumulate=True)
            rest.neg_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        stored.compress(rest, out=row.unsqueeze(0))
    return out


def add_differences(codec: Codec, differences: Tensor, reference: Tensor, out: Tensor) -> Tensor:
    """`reference`, with 0 where it is not finite, plus the decompressed differences -> `reference` and `out`, which is
    returned.

    Args:
        differences: uint8 [chunks, compressed_bytes(elements)], contiguous.
        reference: [chunks * elements], contiguous, of a float dtype. The sum is made in fp32 and rounded to it.
        out: like `reference`.

    Raises:
        TypeError: an argument is not a tensor, or of a dtype that is not supported.
        ValueError: a shape, size, layout or device does not fit.
    """
    check_vector("reference", reference, FLOAT_DTYPES)
    check_vector("out", out, (reference.dtype,))
    chunks = rows_of("differences", differences)
    elements = elements_of_chunks("reference", reference, chunks)
    check_bytes("differences", differences, (chunks, codec.compressed_bytes(elements)), reference.device)
    if out.numel() != reference.numel():
        raise ValueError(f"out has {out.numel()} elements, and reference has {reference.numel()}; give as many")
    if not elements:
        return out
    if (kernels := _kernels(codec, reference)) is not None:
        kernels.add_differences(codec, differences, reference, out)
        return out
    reference.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return out.copy_(codec.decompress(differences, reference, accumulate=True))


def _kernels(codec: Codec, tensor: Tensor) -> ModuleType | None:
    if codec.tiles_module is None or not tensor.is_cuda or not has_triton():
        return None
    return importlib.import_module("bagua.codecs.fused_launch")
