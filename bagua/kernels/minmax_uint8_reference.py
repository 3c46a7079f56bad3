"""MinMaxUInt8 in plain torch operations: what the compiled kernels must equal bit for bit, on any device.

For each range, in fp32, every operation rounded on its own:

    h    = max / 2 - min / 2              half the range; halves, because max - min may overflow
    s    = 127.5 / h                      levels per unit
    bias = 2^23 + 255 - rint(max * s)     rint: half to even
    byte = clamp(v * s + bias, 2^23, 2^23 + 255) - 2^23
    v'   = ((2^23 + byte) - bias) * (h * (1 / 127.5))

The sum v * s + bias lies where fp32 has the integers and nothing between them, and so is rounded to a level. If h is 0
or so small that s is infinite (below 3.7e-37), the range has one level: all bytes are 255, and v' is the number of the
range that is closest to 0. A range with an element that is not finite is stored as (NaN, NaN) with bytes 0, and decodes
to NaN. Of a mean, the ends are those of the sum times 1 / n, and so is s where it meets elements of the sum.

The lowest or the highest level lies up to half a level outside of the range. Decompression clamps v' to the range, so
that what came from a dtype fits into it again; the sum of several versions does without.

It runs in the thread and on the stream of the caller; the arguments were checked by bagua.kernels.minmax_uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from bagua.kernels.minmax_uint8_layout import RANGE_BYTES, ChunkLayout

# 1 / 127.5 as fp32 has it.
UNITS_PER_LEVEL = 0.007843137718737125
# From here to twice as much, fp32 has the integers and nothing between them.
INTEGERS = 2.0**23


def compress(source: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    """`source` [chunks, elements] of a float type -> `out` uint8 [chunks, total_bytes]."""
    if layout.ranges:
        _compress(source.float(), 1.0, layout, out)


def _compress(source: Tensor, factor: float, layout: ChunkLayout, out: Tensor) -> None:
    """`source` [chunks, elements] fp32 times `factor`."""
    values = _by_range(source, layout)
    # Made where it is used: a copy to a GPU would keep the host waiting.
    times = torch.full((), factor, dtype=torch.float32, device=values.device)
    finite = values.isfinite().all(dim=2, keepdim=True)
    # + 0.0 makes -0.0 to 0.0: which zero is the smaller differs between machines, as do the bits of NaN + 0.0.
    lowest = torch.where(finite, values.amin(dim=2, keepdim=True) * times + 0.0, torch.nan)
    highest = torch.where(finite, values.amax(dim=2, keepdim=True) * times + 0.0, torch.nan)
    scale, bias = _scale(lowest, highest)
    levels = (values * (scale * times) + bias).clamp(INTEGERS, INTEGERS + 255.0) - INTEGERS
    levels = torch.where(finite, levels, 0.0).to(torch.uint8)

    chunks = source.shape[0]
    header = RANGE_BYTES * layout.ranges
    out.zero_()
    out[:, :header] = torch.cat((lowest, highest), dim=2).view(chunks, -1).view(torch.uint8)
    out[:, layout.header_bytes : layout.header_bytes + layout.elements] = levels.view(chunks, -1)[:, : layout.elements]


def decompress(compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout) -> None:
    """uint8 [chunks, total_bytes] -> `target` [chunks, elements] of a float type, overwritten or added to in fp32."""
    if layout.ranges == 0:
        return
    decoded = _decoded(compressed, layout, clamp=True)
    target.copy_(target.float() + decoded if accumulate else decoded)


def decompress_reduce_compress(received: Tensor, average: bool, layout: ChunkLayout, out: Tensor) -> None:
    """uint8 [n, total_bytes], n versions of one chunk -> their sum or mean, compressed: `out` uint8 [total_bytes]."""
    if layout.ranges == 0:
        return
    total = _decoded(received[:1], layout, clamp=False)
    for rank in range(1, received.shape[0]):
        total += _decoded(received[rank : rank + 1], layout, clamp=False)
    _compress(total, 1.0 / received.shape[0] if average else 1.0, layout, out.unsqueeze(0))


def _scale(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """(levels per unit, bias) of ranges; 0 levels per unit if there is but one level."""
    half = highest * 0.5 - lowest * 0.5
    # A tensor, because torch takes a division of a number as a product with a reciprocal, which rounds twice.
    scale = torch.full_like(half, 127.5) / half
    scale = torch.where(scale.isfinite(), scale, 0.0)
    return scale, (INTEGERS + 255.0) - (highest * scale).round()


def _decoded(compressed: Tensor, layout: ChunkLayout, clamp: bool) -> Tensor:
    """fp32 [chunks, elements]."""
    chunks = compressed.shape[0]
    # A copy, because the bytes need not lie at a multiple of 4.
    header = compressed[:, : RANGE_BYTES * layout.ranges].clone(memory_format=torch.contiguous_format)
    ends = header.view(torch.float32).view(chunks, layout.ranges, 2)
    lowest, highest = ends[:, :, :1], ends[:, :, 1:]
    scale, bias = _scale(lowest, highest)
    step = (highest * 0.5 - lowest * 0.5) * UNITS_PER_LEVEL
    # One level: (255 - 254) * what it stands for. NaN is in no order, and stays.
    closest_to_zero = torch.where(lowest > 0.0, lowest, torch.where(highest < 0.0, highest, highest - highest))
    bias = torch.where(scale == 0.0, INTEGERS + 254.0, bias)
    step = torch.where(scale == 0.0, closest_to_zero, step)
    levels = compressed[:, layout.header_bytes : layout.header_bytes + layout.elements].float()
    decoded = ((INTEGERS + _by_range(levels, layout)) - bias) * step
    if clamp:
        decoded = decoded.clamp(lowest, highest)
    return decoded.view(chunks, -1)[:, : layout.elements]


def _by_range(values: Tensor, layout: ChunkLayout) -> Tensor:
    """[chunks, elements] as [chunks, ranges, block]; a shorter last range repeats its last element."""
    chunks = values.shape[0]
    missing = layout.ranges * layout.block - layout.elements
    if missing:
        values = functional.pad(values.unsqueeze(1), (0, missing), mode="replicate").squeeze(1)
    return values.reshape(chunks, layout.ranges, layout.block)
