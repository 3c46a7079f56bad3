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
to NaN. The lowest or the highest level lies up to half a level outside of the range. Decompression clamps v' to the
range, so that what came from a dtype fits into it again.

Versions of a chunk are added as integers, which takes a processor a third of what their elements would take as floats.
For each range of n versions, H being the largest h and S its s:

    K     = 2^14, of 3 or 4 versions 2^13, of 5 to 8 2^12
    w     = rint((h * S) * (K / 127.5))             of each version; 0 if it has one level
    zero  = clamp(bias - 2^23, 0, 255)              its level that is closest to 0; 255 if it has one level
    base  = the sum of the versions' ((2^23 + zero) - bias) * (h * (1 / 127.5)), in their order
    a     = the sum of ((byte - 128) * w + 64) >> 7, in parts of a level of the widest version
    a0    = the sum of ((zero - 128) * w + 64) >> 7
    value = base + ((a - a0) * (128 / K)) * (H * (1 / 127.5))

The smallest and the largest of the values, times 1 / n for a mean, are the ends of the result, whose s and
rint(max * s) are as above. Its bytes come from integers, too. With r the largest a less the smallest, shifted such that
it has 16 bits, and x the element's a less the smallest, shifted alike:

    m     = 2^16 * 128 * 255 / r                    rounded once, then its integer part
    g     = 128 * (min * s + (255 - rint(max * s))) + 65, clamped to 0..127, its integer part
    byte  = (x * m + g * 2^16) >> 23                a level has 128 parts

If the sum has one level, all bytes are 255; if it is not finite, it is stored as such a range.

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
# Of a level, in bytes of a sum before they are rounded.
LEVEL_PARTS = 128.0


@torch.no_grad()
def compress(source: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    """`source` of a float type, chunks * elements, contiguous -> `out` uint8 [chunks, total_bytes]."""
    if layout.ranges == 0:
        return
    values = by_ranges(source.view(out.shape[0], -1).float(), layout)
    finite = values.isfinite().all(dim=2, keepdim=True)
    lowest, highest = _canonical(values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True), finite)
    scale, bias = _scale_and_bias(lowest, highest)
    levels = (values * scale + bias).clamp(INTEGERS, INTEGERS + 255.0) - INTEGERS
    _write(lowest, highest, torch.where(finite, levels, 0.0), layout, out)


@torch.no_grad()
def decompress(compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout) -> None:
    """uint8 [chunks, total_bytes] -> `target` of a float type, chunks * elements, contiguous; overwritten or added to
    in fp32."""
    if layout.ranges == 0:
        return
    lowest, highest, levels = _read(compressed, layout)
    _, bias, step = _levels_of(lowest, highest)
    decoded = ((INTEGERS + levels) - bias) * step
    decoded = decoded.clamp(lowest, highest).view(compressed.shape[0], -1)[:, : layout.elements]
    target = target.view(compressed.shape[0], -1)
    target.copy_(target.float() + decoded if accumulate else decoded)


def decompress_reduce_compress(received: Tensor, average: bool, layout: ChunkLayout, out: Tensor) -> None:
    """uint8 [n, total_bytes], n versions of one chunk -> their sum or mean, compressed: `out` uint8 [total_bytes]."""
    if layout.ranges == 0:
        return
    base, step, zero, total = _sum(received, layout)
    # What follows belongs to the result's ranges: [1, ranges, 1], and [1, ranges, block] of their elements.
    smallest, largest = total.amin(dim=2, keepdim=True), total.amax(dim=2, keepdim=True)
    part = 128.0 / weight_of_widest(received.shape[0])
    factor = _number(1.0 / received.shape[0] if average else 1.0, base)
    lowest = (base + (smallest - zero).float() * part * step) * factor
    highest = (base + (largest - zero).float() * part * step) * factor
    finite = lowest.isfinite() & highest.isfinite()
    lowest, highest = _canonical(lowest, highest, finite)
    scale, _ = _scale_and_bias(lowest, highest)

    spread = largest - smallest
    _, exponent = spread.float().frexp()
    shift = 16 - exponent
    spread, above = _shifted(spread, shift), _shifted(total - smallest, shift)
    # Without a spread there is one level.
    times = (_number(LEVEL_PARTS * 255.0 * 65536.0, base) / torch.where(spread == 0, 1, spread).float()).to(torch.int64)
    plus = LEVEL_PARTS * (lowest * scale + (255.0 - (highest * scale).round())) + (LEVEL_PARTS / 2 + 1)
    plus = plus.clamp(0.0, LEVEL_PARTS - 1.0).nan_to_num().to(torch.int64)
    levels = (above * times + plus * 65536) >> 23
    levels = torch.where(scale == 0.0, 255, levels)
    _write(lowest, highest, torch.where(finite, levels, 0), layout, out.unsqueeze(0))


def weight_of_widest(versions: int) -> float:
    """K: the sum of up to 8 versions has 16 bits, so that processors add 16 or 32 elements at once; more have 32."""
    if versions <= 2 or versions > 8:
        return 2.0**14
    return 2.0**13 if versions <= 4 else 2.0**12


def _sum(received: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(base, step of the widest version, a0, a): [1, ranges, 1], and int64 for a0 and for a, [1, ranges, block]."""
    lowest, highest, levels = _read(received, layout)
    scale, bias, step = _levels_of(lowest, highest)
    # Ends in the wrong order, which compress does not write, count as one level: weights must fit.
    has_levels = scale > 0.0
    half = torch.where(has_levels, highest * 0.5 - lowest * 0.5, 0.0)
    widest = half.amax(dim=0, keepdim=True)
    scale_of_widest = torch.where(has_levels, scale, torch.inf).amin(dim=0, keepdim=True)
    weight = (half * scale_of_widest) * (weight_of_widest(received.shape[0]) / 127.5)
    weight = torch.where(has_levels, weight, 0.0).round().to(torch.int64)
    closest = torch.where(has_levels, (bias - INTEGERS).clamp(0.0, 255.0), 255.0)
    bases = ((INTEGERS + closest) - bias) * step
    base = bases[:1]
    for version in bases[1:]:
        base = base + version

    def weighted(numbers: Tensor) -> Tensor:
        return (((numbers.to(torch.int64) - 128) * weight + 64) >> 7).sum(dim=0, keepdim=True)

    return base, widest * UNITS_PER_LEVEL, weighted(closest), weighted(levels)


def _shifted(number: Tensor, shift: Tensor) -> Tensor:
    """To the left, or to the right if `shift` is negative."""
    return torch.where(shift >= 0, number << shift.clamp(min=0), number >> (-shift).clamp(min=0))


def _canonical(lowest: Tensor, highest: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """The ends as they are stored."""
    # + 0.0 makes -0.0 to 0.0: which zero is the smaller differs between machines, as do the bits of NaN + 0.0.
    return torch.where(finite, lowest + 0.0, torch.nan), torch.where(finite, highest + 0.0, torch.nan)


def _scale_and_bias(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """(levels per unit, bias) of ranges; 0 levels per unit if there is but one level."""
    half = highest * 0.5 - lowest * 0.5
    scale = _number(127.5, half) / half
    scale = torch.where(scale.isfinite(), scale, 0.0)
    return scale, (INTEGERS + 255.0) - (highest * scale).round()


def _levels_of(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(levels per unit, bias, units per level), to decode."""
    scale, bias = _scale_and_bias(lowest, highest)
    step = (highest * 0.5 - lowest * 0.5) * UNITS_PER_LEVEL
    # One level: (255 - 254) * what it stands for. NaN is in no order, and stays.
    closest_to_zero = torch.where(lowest > 0.0, lowest, torch.where(highest < 0.0, highest, highest - highest))
    bias = torch.where(scale == 0.0, INTEGERS + 254.0, bias)
    return scale, bias, torch.where(scale == 0.0, closest_to_zero, step)


def _number(value: float, like: Tensor) -> Tensor:
    """An fp32 tensor: torch takes a division of a number as a product with a reciprocal, which rounds twice.

    Made where it is used: a copy to a GPU would keep the host waiting.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _read(compressed: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor, Tensor]:
    """(lowest, highest, levels) in fp32: [chunks, ranges, 1] and [chunks, ranges, block]."""
    # A copy, because the bytes need not lie at a multiple of 4.
    header = compressed[:, : RANGE_BYTES * layout.ranges].clone(memory_format=torch.contiguous_format)
    ends = header.view(torch.float32).view(compressed.shape[0], layout.ranges, 2)
    levels = compressed[:, layout.header_bytes : layout.header_bytes + layout.elements].float()
    return ends[:, :, :1], ends[:, :, 1:], by_ranges(levels, layout)


def _write(lowest: Tensor, highest: Tensor, levels: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    """As `_read` gives them -> `out` uint8 [chunks, total_bytes], all of it."""
    chunks = out.shape[0]
    header = RANGE_BYTES * layout.ranges
    out.zero_()
    out[:, :header] = torch.cat((lowest, highest), dim=2).view(chunks, -1).view(torch.uint8)
    elements = levels.to(torch.uint8).view(chunks, -1)[:, : layout.elements]
    out[:, layout.header_bytes : layout.header_bytes + layout.elements] = elements


def by_ranges(values: Tensor, layout: ChunkLayout) -> Tensor:
    """[chunks, elements] as [chunks, ranges, block]; a shorter last range repeats its last element."""
    chunks = values.shape[0]
    missing = layout.ranges * layout.block - layout.elements
    if missing:
        values = functional.pad(values.unsqueeze(1), (0, missing), mode="replicate").squeeze(1)
    return values.reshape(chunks, layout.ranges, layout.block)
