"""int8: a byte for each element, with the smallest and the largest element of every range. Bagua 0.9's MinMaxUInt8.

bagua.kernels.minmax_uint8 has the kernels; docs/design/compression.md the formula, the bytes and the accuracy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs.codec import Codec
from bagua.kernels import minmax_uint8
from bagua.kernels.argument_checks import check_vector
from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS
from bagua.kernels.minmax_uint8_layout import ChunkLayout, chunk_layout
from bagua.kernels.minmax_uint8_reference import by_ranges


class Int8(Codec):
    """256 evenly spaced levels for each range."""

    name = "int8"
    tiles_module = "bagua.codecs.int8_triton"

    def _layout(self, elements: int) -> ChunkLayout:
        return chunk_layout(elements, BLOCK_ELEMENTS)

    def compressed_bytes(self, elements: int) -> int:
        return self._layout(elements).total_bytes

    def header_bytes(self, elements: int) -> int:
        return self._layout(elements).header_bytes

    def error_bound(self, source: Tensor, chunks: int = 1) -> Tensor:
        """Half a level of the range, (max - min) / 510, and rounding: of fp32, and of the source's dtype."""
        check_vector("source", source, self.dtypes)
        if not source.numel():
            return source.float()
        layout = self._layout(source.numel() // chunks)
        by_range = by_ranges(source.detach().view(chunks, -1).double(), layout)
        low, high = by_range.amin(dim=2, keepdim=True), by_range.amax(dim=2, keepdim=True)
        kind = torch.finfo(source.dtype)
        rounding = 4 * (kind.eps * torch.maximum(low.abs(), high.abs()) + kind.smallest_normal)
        bound = (high - low) / 510 * (1 + 1e-4) + rounding
        # Ranges that are so narrow have one level.
        bound = torch.where((high - low) / 2 < 3.8e-37, high - low, bound)
        bound = torch.where(by_range.isfinite().all(dim=2, keepdim=True), bound, torch.nan)
        return bound.expand_as(by_range).reshape(chunks, -1)[:, : layout.elements].reshape(-1).float()

    def _compress(self, source: Tensor, elements: int, out: Tensor) -> None:
        minmax_uint8._implementation_for(source).compress(source, self._layout(elements), out)

    def _decompress(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
        layout = self._layout(elements)
        minmax_uint8._implementation_for(target).decompress(compressed, target, accumulate, layout)

    def _decompress_reduce_compress(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
        layout = self._layout(elements)
        minmax_uint8._implementation_for(received).decompress_reduce_compress(received, average, layout, out)
