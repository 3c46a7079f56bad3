"""The comparison of a codec's Triton kernels with its formula in torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
from support.minmax_data import numbers, same_numbers
from torch import Tensor

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
