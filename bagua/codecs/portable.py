"""Codecs whose formula is written in torch operations, for any device, and in Triton, for CUDA."""

from __future__ import annotations

import functools
import importlib
from abc import abstractmethod
from types import ModuleType
from typing import ClassVar

from torch import Tensor

from bagua.codecs.codec import Codec
from bagua.kernels.minmax_uint8_triton_launch import aligned, aligned_like, has_triton


class PortableCodec(Codec):
    """
    Attributes:
        triton_module: with functions that do what the methods `*_in_torch` do, given the codec first. Their bytes and
            their floats are the same, bit for bit. Bytes lie at a multiple of 16, through a copy where they did not.
    """

    triton_module: ClassVar[str]

    @abstractmethod
    def compress_in_torch(self, source: Tensor, elements: int, out: Tensor) -> None:
        """Floats [chunks * elements] -> uint8 [chunks, compressed_bytes(elements)], all of it."""

    @abstractmethod
    def decompress_in_torch(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
        """uint8 [chunks, compressed_bytes(elements)] -> floats [chunks * elements], assigned or added in fp32."""

    @abstractmethod
    def sum_in_torch(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
        """uint8 [n, compressed_bytes(elements)] -> their sum or mean: uint8 [compressed_bytes(elements)]."""

    def _compress(self, source: Tensor, elements: int, out: Tensor) -> None:
        kernels = _kernels(self.triton_module) if source.is_cuda else None
        if kernels is None:
            self.compress_in_torch(source, elements, out)
        else:
            result = aligned_like(out)
            kernels.compress(self, source, elements, result)
            if result is not out:
                out.copy_(result)

    def _decompress(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
        kernels = _kernels(self.triton_module) if target.is_cuda else None
        if kernels is None:
            self.decompress_in_torch(compressed, elements, target, accumulate)
        else:
            kernels.decompress(self, aligned(compressed), elements, target, accumulate)

    def _decompress_reduce_compress(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
        kernels = _kernels(self.triton_module) if received.is_cuda else None
        if kernels is None:
            self.sum_in_torch(received, elements, average, out)
        else:
            result = aligned_like(out)
            kernels.decompress_reduce_compress(self, aligned(received), elements, average, result)
            if result is not out:
                out.copy_(result)


@functools.cache
def _kernels(name: str) -> ModuleType | None:
    """None where Triton is not installed."""
    return importlib.import_module(f"bagua.codecs.{name}") if has_triton() else None
