"""What communication in bytes has to give, in plain torch from its formula: nothing of bagua.kernels or bagua.comm_ops
but the number of elements that share a range. For use inside a rank; on the CPU, whatever the tensors come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS

ALIGNED_ELEMENTS = 32  # chunks begin at multiples


# From here to twice as much, 32-bit numbers are integers.
INTEGERS = 2.0**23


def rounded(chunk: Tensor, factor: float = 1.0, clamp: bool = True) -> Tensor:
    """A chunk of 32-bit numbers times `factor`, after compression and decompression: each range has 256 levels, which
    are multiples of their distance. The last of them may lie outside of the range, if it is not cut off there
    (`clamp`)."""
    parts = []
    times = torch.tensor(factor)
    for values in chunk.split(BLOCK_ELEMENTS):
        low, high = values.min() * times + 0.0, values.max() * times + 0.0
        half = high * 0.5 - low * 0.5
        levels_per_unit = torch.tensor(127.5) / half  # a number before the tensor would be multiplied by a reciprocal
        if not levels_per_unit.isfinite():
            levels_per_unit = torch.tensor(0.0)
        # Of the highest level INTEGERS + 255 is made, and the sum rounds to a level.
        bias = INTEGERS + 255.0 - torch.round(high * levels_per_unit)
        number = torch.clamp(values * (levels_per_unit * times) + bias, INTEGERS, INTEGERS + 255.0)
        decoded = (number - bias) * (half * torch.tensor(1 / 127.5))
        if levels_per_unit == 0:  # all are as good as equal: the one that is closest to zero
            decoded = torch.clamp(torch.zeros_like(values), low, high)
        elif clamp:
            decoded = torch.clamp(decoded, low, high)
        parts.append(decoded if values.isfinite().all() else torch.full_like(values, math.nan))
    return torch.cat(parts)


def reduced_in_bytes(versions: Sequence[Tensor], average: bool) -> Tensor:
    """The sum or mean of flat tensors, one per peer: each is cut into a chunk per peer and rounded, the chunks are
    added up in 32 bits, and rounded again."""
    peers = len(versions)
    chunks = []
    for number in range(peers):
        total: Tensor | None = None
        for version in versions:
            mine = rounded(version.float().chunk(peers)[number], clamp=False)
            total = mine if total is None else total + mine
        assert total is not None
        chunks.append(rounded(total, 1.0 / peers if average else 1.0))
    return torch.cat(chunks).to(versions[0].dtype)


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
