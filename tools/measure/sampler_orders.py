"""The batches that `measure balance` compares: what a rank gets in an epoch, by sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import DistributedSampler

from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

Batches = list[list[int]]
SAMPLERS = ("distributed", "group_by_length", "load_balancing", "load_balancing_batches")
WINDOW = 50  # Transformers sorts that many times the batch size of one rank together


def cut(indices: Sequence[int], size: int) -> Batches:
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def grouped_by_length(lengths: Sequence[int], size: int, ranks: int, rank: int, epoch: int) -> Batches:
    """Random windows, each sorted from long to short; ranks take every `ranks`-th index."""
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).tolist()
    windows = cut(order, min(len(lengths) // (4 * size), WINDOW) * size)
    order = [index for window in windows for index in sorted(window, key=lambda one: -lengths[one])]
    order += order[: -len(order) % ranks]
    return cut(order[rank::ranks], size)


def batches_of(name: str, lengths: Sequence[int], size: int, ranks: int, rank: int, epoch: int) -> Batches:
    """An epoch of one rank."""
    if name == "distributed":
        plain: DistributedSampler[int] = DistributedSampler(lengths, ranks, rank)  # type: ignore[arg-type]
        plain.set_epoch(epoch)
        return cut(list(plain), size)
    if name == "group_by_length":
        return grouped_by_length(lengths, size, ranks, rank, epoch)
    balanced = LoadBalancingDistributedSampler(lengths, float, ranks, rank)
    balanced.set_epoch(epoch)
    if name == "load_balancing":
        return cut(list(balanced), size)

    def sort_windows(indices: list[int]) -> Batches:
        windows = cut(indices, max(1, WINDOW // ranks) * size)
        batches = [batch for window in windows for batch in cut(sorted(window, key=lengths.__getitem__), size)]
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch))
        return [batches[number] for number in order.tolist()]

    return list(LoadBalancingDistributedBatchSampler(balanced, sort_windows))
