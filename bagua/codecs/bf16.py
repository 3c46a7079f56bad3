"""bf16: two bytes for each element, rounded to bfloat16, half to even.

Each element is a block of its own: NaN and infinity stay what they are, and numbers above 3.39e38 become infinite. A
finite float16 does not: it is limited to 65280, the largest bfloat16 below float16's largest. NaN is stored as 7FC0. A
sum adds the versions in their order, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs.portable import PortableCodec
from bagua.kernels.argument_checks import check_vector
from bagua.kernels.minmax_uint8_layout import padded

# The largest bfloat16 that is a float16, too.
LARGEST_HALF = 65280.0


class Bf16(PortableCodec):
    """A cast. An element's error is at most 1/256 of it."""

    name = "bf16"
    triton_module = "bf16_triton"
    tiles_module = "bagua.codecs.bf16_triton"

    def compressed_bytes(self, elements: int) -> int:
        if elements < 0:
            raise ValueError(f"a chunk cannot have {elements} elements; give 0 or more")
        return padded(2 * elements)

    @torch.no_grad()
    def error_bound(self, source: Tensor, chunks: int = 1) -> Tensor:
        """1/256 of the element; infinite where it becomes infinite."""
        check_vector("source", source, self.dtypes)
        values = source.float()
        becomes_infinite = values.bfloat16().isinf() & (source.dtype == torch.float32)
        return torch.where(becomes_infinite, torch.inf, values.abs() * 2.0**-8 + 2.0**-134)

    @torch.no_grad()
    def compress_in_torch(self, source: Tensor, elements: int, out: Tensor) -> None:
        values = source.view(out.shape[0], -1)
        if source.dtype == torch.float16:
            values = torch.where(values.isinf(), values, values.clamp(-LARGEST_HALF, LARGEST_HALF))
        _write(values, elements, out)

    @torch.no_grad()
    def decompress_in_torch(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
        numbers, rows = _numbers(compressed, elements), target.view(compressed.shape[0], -1)
        if not accumulate:
            rows.copy_(numbers)
        elif target.dtype == torch.float32:
            rows.add_(numbers)
        else:
            rows.copy_(rows.float().add_(numbers))

    def sum_in_torch(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
        numbers = _numbers(received, elements)
        total = torch.zeros(elements, dtype=torch.float32, device=out.device)
        for version in numbers:
            total.add_(version)
        if average:
            total.mul_(1.0 / len(numbers))
        _write(total.unsqueeze(0), elements, out.unsqueeze(0))


def _numbers(compressed: Tensor, elements: int) -> Tensor:
    """bfloat16 [chunks, elements]: the memory itself if it lies at a multiple of 2, otherwise a copy."""
    if compressed.storage_offset() % 2:
        compressed = compressed.clone()
    return compressed.view(torch.bfloat16)[:, :elements]


def _write(values: Tensor, elements: int, out: Tensor) -> None:
    """Floats [chunks, elements] -> uint8 [chunks, total_bytes], all of it."""
    aligned = out if out.storage_offset() % 2 == 0 else torch.empty_like(out)
    numbers = aligned.view(torch.bfloat16)
    numbers[:, :elements].copy_(values)
    numbers[:, elements:].zero_()
    # Processors differ in the bits of NaN.
    numbers.masked_fill_(numbers.isnan(), torch.nan)
    if aligned is not out:
        out.copy_(aligned)
