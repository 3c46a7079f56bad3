"""The protocol of codecs, and the checks of arguments that they share.

A codec turns chunks of floats into bytes of a fixed length, which depends on the number of elements alone. Its blocks
of elements, which share a scale or a range, do not cross chunks. Every implementation of a codec gives the same bytes
for the same numbers, so that all ranks end with the same bits.

Functions may be called by several threads at once. No gradients flow through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from bagua.kernels.argument_checks import (
    FLOAT_DTYPES,
    bytes_to_write,
    check_bytes,
    check_vector,
    elements_of_chunks,
    rows_of,
)


def dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    """For messages: "bfloat16, float32"."""
    return ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))


class Codec(ABC):
    """
    Attributes:
        name: of `get_codec`.
        dtypes: that can be compressed and decompressed.
        alignment: a chunk should have a multiple of so many elements, so that chunks begin where vectors can be loaded
            and no block is cut short. Other lengths work too.
        tiles_module: the Triton functions that decompress a tile (bagua.codecs.fused_triton); None: there are none.
        has_fp8_codes: they ask whether the device converts fp8.
        is_slow_on_cpus: there, it is many operations of torch.
    """

    name: str
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    alignment: int = 32
    tiles_module: ClassVar[str | None] = None
    has_fp8_codes: ClassVar[bool] = False
    is_slow_on_cpus: ClassVar[bool] = False

    @abstractmethod
    def compressed_bytes(self, elements: int) -> int:
        """The bytes of one compressed chunk of `elements` elements, a multiple of 32.

        Raises:
            ValueError: a negative number.
        """

    def header_bytes(self, elements: int) -> int:
        """The bytes of a compressed chunk before its codes."""
        return 0

    @abstractmethod
    def error_bound(self, source: Tensor, chunks: int = 1) -> Tensor:
        """The largest |decoded - source| that each element may have after one round trip into the dtype of `source`.

        Returns:
            float32, of the shape of `source`; NaN where the decoded element is NaN.
        """

    def compress(self, source: Tensor, chunks: int = 1, out: Tensor | None = None) -> Tensor:
        """`source`, cut into equal chunks, as bytes.

        Args:
            source: 1-D, contiguous, of one of the `dtypes`, its number of elements a multiple of `chunks`; it may be
                empty. A block with an element that is not finite decodes to NaN in all its elements.
            chunks: how many.
            out: where to write the result; every byte of it is written. It must not overlap `source`.

        Returns:
            uint8 [chunks, compressed_bytes(elements of a chunk)].

        Raises:
            TypeError: an argument is not a tensor, or of a dtype that is not supported.
            ValueError: a shape, size, layout or device does not fit.
        """
        check_vector("source", source, self.dtypes)
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; give 1 or more")
        elements = elements_of_chunks("source", source, chunks)
        out = bytes_to_write("out", out, (chunks, self.compressed_bytes(elements)), source.device)
        if elements:
            self._compress(source, elements, out)
        return out

    def decompress(self, compressed: Tensor, target: Tensor, accumulate: bool = False) -> Tensor:
        """Writes what `compress` made into `target`, or adds it to `target`, and returns `target`.

        Args:
            compressed: uint8 [chunks, compressed_bytes(elements of a chunk)], contiguous, from any of the dtypes.
            target: 1-D, contiguous, of one of the `dtypes`, chunks * elements of a chunk.
            accumulate: add in fp32, then round to the dtype of `target`.

        Raises:
            TypeError: an argument is not a tensor, or of a dtype that is not supported.
            ValueError: a shape, size, layout or device does not fit.
        """
        check_vector("target", target, self.dtypes)
        chunks = rows_of("compressed", compressed)
        elements = elements_of_chunks("target", target, chunks, may_be_padded=False)
        check_bytes("compressed", compressed, (chunks, self.compressed_bytes(elements)), target.device)
        if elements:
            self._decompress(compressed, elements, target, accumulate)
        return target

    def decompress_reduce_compress(
        self, received: Tensor, elements: int, average: bool, out: Tensor | None = None
    ) -> Tensor:
        """n versions of one chunk -> their sum, compressed again.

        The bits depend on the versions and their order alone. A block which is NaN in one version, or whose sum is not
        finite, becomes NaN.

        Args:
            received: uint8 [n, compressed_bytes(elements)], contiguous, n at least 1: the chunk of n ranks.
            elements: of the chunk.
            average: multiply the sum by 1 / n.
            out: where to write the result; every byte of it is written. It must not overlap `received`.

        Returns:
            uint8 [compressed_bytes(elements)].

        Raises:
            TypeError: an argument is not a tensor, or not of uint8.
            ValueError: a shape, size, layout or device does not fit.
        """
        size = self.compressed_bytes(elements)
        versions = rows_of("received", received)
        check_bytes("received", received, (versions, size), received.device)
        out = bytes_to_write("out", out, (size,), received.device)
        if elements:
            self._decompress_reduce_compress(received, elements, average, out)
        return out

    # What a codec implements: the arguments are checked, and there is at least one element in each chunk.

    @abstractmethod
    def _compress(self, source: Tensor, elements: int, out: Tensor) -> None: ...

    @abstractmethod
    def _decompress(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None: ...

    @abstractmethod
    def _decompress_reduce_compress(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None: ...
