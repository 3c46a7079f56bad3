"""What communication in bytes has to give, in plain torch from its formula: nothing of bagua.kernels or bagua.comm_ops
but the number of elements that share a range. For use inside a rank; on the CPU, whatever the tensors come from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS

ALIGNED_ELEMENTS = 32  # chunks begin at multiples

# From here to twice as much, 32-bit numbers are integers.
INTEGERS = 2.0**23
UNITS_PER_LEVEL = torch.tensor(1 / 127.5)
# hierarchical, average and dtype of tests of the formula: what is done to one does not depend on the others.
CHOICES = (
    (False, False, torch.float32),
    (False, True, torch.bfloat16),
    (True, True, torch.float32),
    (True, False, torch.float16),
)
EVERY_CHOICE = tuple(
    itertools.product((False, True), (False, True), (torch.float32, torch.float16, torch.bfloat16))
)  # for `make deep`
ONE_NUMBER = torch.tensor(0.0)  # levels per unit where all elements are as good as equal


@dataclass(frozen=True)
class Levels:
    """Of a range, from its ends: 256 of them, which are multiples of their distance."""

    low: Tensor
    high: Tensor

    @property
    def half(self) -> Tensor:
        return self.high * 0.5 - self.low * 0.5

    @property
    def per_unit(self) -> Tensor:
        found = torch.tensor(127.5) / self.half  # a number before the tensor would be multiplied by a reciprocal
        return found if found.isfinite() else ONE_NUMBER

    @property
    def bias(self) -> Tensor:
        """Of the highest level it makes INTEGERS + 255, and adding it rounds to a level."""
        return INTEGERS + 255.0 - torch.round(self.high * self.per_unit)

    def closest_to_zero(self) -> Tensor:
        return torch.clamp(torch.zeros(()), self.low, self.high)

    def bytes_of(self, values: Tensor) -> Tensor:
        return torch.clamp(values * self.per_unit + self.bias, INTEGERS, INTEGERS + 255.0) - INTEGERS

    def decoded(self, levels: Tensor) -> Tensor:
        """The last of them may lie outside of the range, and is not cut off here."""
        return ((INTEGERS + levels) - self.bias) * (self.half * UNITS_PER_LEVEL)


def _levels_of(values: Tensor) -> Levels:
    return Levels(values.min() + 0.0, values.max() + 0.0)


def rounded(chunk: Tensor, block: int = BLOCK_ELEMENTS) -> Tensor:
    """A chunk of 32-bit numbers after compression and decompression."""
    parts = []
    for values in chunk.split(block):
        levels = _levels_of(values)
        if not values.isfinite().all():
            parts.append(torch.full_like(values, math.nan))
        elif levels.per_unit == 0:
            parts.append(levels.closest_to_zero().expand_as(values))
        else:
            parts.append(torch.clamp(levels.decoded(levels.bytes_of(values)), levels.low, levels.high))
    return torch.cat(parts)


def added(versions: Sequence[Tensor], factor: float) -> Tensor:
    """The elements of a range in each version, compressed, added as integers, times `factor`, compressed, decompressed.

    Every version weighs as much as its range is wide beside the widest, whose levels are cut into whole parts.
    """
    if not all(values.isfinite().all() for values in versions):
        return torch.full_like(versions[0], math.nan)
    weight_of_widest = 2**14 if not 2 < len(versions) <= 8 else 2**13 if len(versions) <= 4 else 2**12
    ranges = [_levels_of(values) for values in versions]
    widest = max(ranges, key=lambda one: float(one.half) if one.per_unit else -1.0)
    base = torch.tensor(0.0)
    total = torch.zeros(versions[0].numel(), dtype=torch.int64)
    of_zero = 0
    for levels, values in zip(ranges, versions, strict=True):
        if levels.per_unit == 0:
            base = base + levels.closest_to_zero()
            continue
        weight = int(torch.round((levels.half * widest.per_unit) * torch.tensor(weight_of_widest / 127.5)))
        zero = torch.clamp(levels.bias - INTEGERS, 0.0, 255.0)
        base = base + levels.decoded(zero)
        total += ((levels.bytes_of(values).long() - 128) * weight + 64) >> 7
        of_zero += ((int(zero) - 128) * weight + 64) >> 7

    step = widest.half * UNITS_PER_LEVEL if widest.per_unit else torch.tensor(0.0)

    def value_of(number: int) -> Tensor:
        parts = torch.tensor(float(number - of_zero)) * (128.0 / weight_of_widest)
        return (base + parts * step) * torch.tensor(factor) + 0.0

    least, most = int(total.min()), int(total.max())
    result = Levels(value_of(least), value_of(most))
    if not (result.low.isfinite() and result.high.isfinite()):
        return torch.full_like(versions[0], math.nan)
    if result.per_unit == 0:
        return result.closest_to_zero().expand_as(versions[0])
    shift = 16 - (most - least).bit_length()
    spread, above = (
        (number * 2**shift if shift >= 0 else number >> -shift)
        for number in (torch.tensor(most - least), total - least)
    )
    times = int(torch.tensor(128 * 255 * 65536.0) / spread.float())
    of_lowest = result.low * result.per_unit + (255.0 - torch.round(result.high * result.per_unit))
    plus = int(torch.clamp(128.0 * of_lowest + 65.0, 0.0, 127.0))
    levels = (above * times + plus * 65536) >> 23
    return torch.clamp(result.decoded(levels.float()), result.low, result.high)


def reduced_in_bytes(versions: Sequence[Tensor], average: bool) -> Tensor:
    """The sum or mean of flat tensors, one per peer: each is cut into a chunk per peer and rounded, the chunks are
    added up, and rounded again."""
    peers = len(versions)
    chunks = [version.float().chunk(peers) for version in versions]
    parts = []
    for number in range(peers):
        ranges = zip(*(mine[number].split(BLOCK_ELEMENTS) for mine in chunks), strict=True)
        parts += [added(versions_of_range, 1.0 / peers if average else 1.0) for versions_of_range in ranges]
    return torch.cat(parts).to(versions[0].dtype)


def expected(flats: Sequence[Tensor], average: bool, nodes: Sequence[Sequence[int]] | None = None) -> Tensor:
    """What every rank has to get of the ranks' gradients.

    Args:
        flats: of each rank, one-dimensional, not padded.
        nodes: of a hierarchy: the ranks of each node.
    """
    elements, ranks = flats[0].numel(), len(flats)
    multiple = math.lcm(ranks, len(nodes) if nodes else 1) * ALIGNED_ELEMENTS
    padded = [torch.nn.functional.pad(flat, (0, -elements % multiple)) for flat in flats]
    if nodes is None:
        return reduced_in_bytes(padded, average)[:elements]
    if average:
        padded = [flat * (1.0 / ranks) for flat in padded]
    sums = []
    for node in nodes:
        total = padded[node[0]].clone()
        for rank in node[1:]:
            total += padded[rank]
        sums.append(total)
    return reduced_in_bytes(sums, average=False)[:elements]


def nodes_of(places: Sequence[dict[str, str]]) -> list[list[int]]:
    """The ranks of each node, as support.training's lists of environments say it."""
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place["GROUP_RANK"], []).append(rank)
    return list(nodes.values())


def of_all_ranks(flat: Tensor) -> list[Tensor]:
    """Every rank's, bit for bit, on the CPU. Collective."""
    mine = flat.detach().contiguous().view(torch.uint8)
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return [one.view(flat.dtype).cpu() for one in everywhere]
