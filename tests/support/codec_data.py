"""The comparison of codecs' Triton kernels with their formulas in torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from support.minmax_data import numbers, same_numbers
from torch import Tensor

from bagua.codecs import Codec, fused, get_codec
from bagua.codecs.portable import PortableCodec

# (elements of a chunk, chunks): odd ends, one element, less than a block, full tiles.
SHAPES = [(300, 2), (1, 1), (7, 3), (512, 1), (33, 2), (1030, 1)]


def differences(
    codec: PortableCodec,
    kind: str,
    elements: int,
    chunks: int,
    dtype: torch.dtype,
    device: str,
    targets: tuple[torch.dtype, ...],
) -> Iterator[str]:
    """What the kernels, on tensors of `device`, make otherwise than torch on the CPU. `chunks` are versions, too."""
    kernels = importlib.import_module(f"bagua.codecs.{codec.triton_module}")
    case = f"{codec.name}: {kind}, {elements} elements of {dtype}, {chunks} chunks"
    source = numbers(kind, elements * chunks, torch.Generator().manual_seed(elements)).to(dtype)
    size = codec.compressed_bytes(elements)

    def bytes_of(filler: int, where: str, *shape: int) -> Tensor:
        return torch.full(shape, filler, dtype=torch.uint8, device=where)

    # Every byte is to be written: two results that are compared begin with different ones.
    expected, actual = bytes_of(77, "cpu", chunks, size), bytes_of(99, device, chunks, size)
    codec.compress_in_torch(source, elements, expected)
    kernels.compress(codec, source.to(device), elements, actual)
    if not torch.equal(expected, actual.cpu()):
        yield f"{case}: compress, {int((expected != actual.cpu()).sum())} bytes"
    received = expected.to(device)
    for target_dtype in targets:
        for accumulate in (False, True):
            before = torch.randn(source.shape, generator=torch.Generator().manual_seed(1)).to(target_dtype)
            wanted, found = before.clone(), before.to(device, copy=True)
            codec.decompress_in_torch(expected, elements, wanted, accumulate)
            kernels.decompress(codec, received, elements, found, accumulate)
            if not same_numbers(wanted, found.cpu()):
                yield f"{case}: decompress to {target_dtype}, {accumulate=}"
    for average in (False, True):
        wanted, found = bytes_of(77, "cpu", size), bytes_of(99, device, size)
        codec.sum_in_torch(expected, elements, average, wanted)
        kernels.decompress_reduce_compress(codec, received, elements, average, found)
        if not torch.equal(wanted, found.cpu()):
            yield f"{case}: decompress_reduce_compress, {average=}, {int((wanted != found.cpu()).sum())} bytes"


def fused_differences(
    codec: Codec, kind: str, elements: int, chunks: int, dtype: torch.dtype, device: str
) -> Iterator[str]:
    """What the kernels of bagua.codecs.fused, on tensors of `device`, make otherwise than the codec's operations one
    after the other on the CPU."""
    kernels = importlib.import_module("bagua.codecs.fused_launch")
    case = f"{codec.name}: {kind}, {elements} elements of {dtype}, {chunks} chunks"
    generator = torch.Generator().manual_seed(elements)
    values = numbers(kind, elements * chunks, generator).to(dtype)
    sent = codec.compress(values, chunks)
    there, sent_there = values.to(device), sent.to(device)
    stored = get_codec(fused.REST_CODEC)
    for position in {0, chunks - 1}:
        own = values.view(chunks, -1)[position]
        wanted, found = torch.empty(elements, dtype=dtype), torch.empty(elements, dtype=dtype, device=device)
        fused.decompress_reduce(codec, sent, own, position, 1 / chunks, wanted)
        kernels.decompress_reduce(codec, sent_there, own.to(device), position, 1 / chunks, found)
        if not same_numbers(wanted, found.cpu()):
            yield f"{case}: decompress_reduce at {position}"
        shape = (chunks, stored.compressed_bytes(elements))
        wanted, found = (torch.full(shape, 77 + i, dtype=torch.uint8, device=("cpu", device)[i]) for i in range(2))
        fused.compress_rest(codec, values, sent, position, wanted)
        kernels.compress_rest(codec, there, sent_there, position, stored, found)
        if not torch.equal(wanted, found.cpu()):
            yield f"{case}: compress_rest without {position}, {int((wanted != found.cpu()).sum())} bytes"
    reference = numbers("few not finite", elements * chunks, generator).to(dtype)
    reference_there, out, out_there = reference.to(device, copy=True), torch.empty_like(values), torch.empty_like(there)
    fused.add_differences(codec, sent, reference, out)
    kernels.add_differences(codec, sent_there, reference_there, out_there)
    for name, one, other in (("reference", reference, reference_there), ("out", out, out_there)):
        if not same_numbers(one, other.cpu()):
            yield f"{case}: add_differences, {name}"
