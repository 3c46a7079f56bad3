"""Which samples a rank trains with in which step. Depends on seed, epoch and the number of ranks alone."""

from __future__ import annotations

import torch
from torch import Tensor


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """What is left over comes in another epoch: every epoch is shuffled anew."""
    return samples // batch_size


def shard(samples: int, batch_size: int, seed: int, epoch: int, rank: int, ranks: int) -> Tensor:
    """Indices [steps, batch_size / ranks]: this rank's part of each batch of an epoch. The batches are alike for every
    number of ranks, and no sample is in two places.

    Raises:
        ValueError: fewer samples than a batch, or a batch that the ranks cannot share evenly.
    """
    steps = steps_per_epoch(samples, batch_size)
    if batch_size % ranks:
        raise ValueError(
            f"a batch of {batch_size} samples cannot be shared by {ranks} ranks evenly; use a number of ranks that"
            " divides it"
        )
    if steps < 1:
        raise ValueError(f"{samples} samples are fewer than a batch of {batch_size}")
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(samples, generator=generator)
    return order[: steps * batch_size].view(steps, ranks, batch_size // ranks)[:, rank]


def evaluation_share(samples: int, rank: int, ranks: int) -> range:
    """The part that a rank evaluates: a contiguous one, all parts together are everything."""
    return range(samples * rank // ranks, samples * (rank + 1) // ranks)
