"""PowerSGD: the mean of gradients from two factors of low rank (Vogels et al., NeurIPS 2019, arXiv:1905.13727).

For each matrix, with g_i the gradient of rank i of n, e_i what it owes, and Q the factor of the last step:

    M_i = g_i / n + e_i
    P   = orthonormal columns of the sum of M_i Q over the ranks       all-reduce of rows * rank numbers
    Q   = the sum of M_i^T P over the ranks                            all-reduce of columns * rank numbers
    g   = P Q^T                                                        on every rank
    e_i = M_i - g / n                                                  added to the next gradient

Starting with the last Q is a step of power iteration on what changes slowly. A gradient of several dimensions is a
matrix of its first dimension and all others. Vectors, and matrices for which two factors are more than half as large,
are summed as they are, in the all-reduce of P.

Sums are the same bits on all ranks, and so are the results, where ranks have the same kind of processor.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua.codecs.owed_scale import OwedScale
from bagua.collectives.communicator import BaguaCommunicator
from bagua.comm_ops.all_reduce import sum_over_ranks
from bagua.engine.bucket import Bucket, PrescaledOp

# Two factors are sent if they have at most this part of the matrix's elements.
_LARGEST_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class LowRankMemory:
    """What one matrix's next step depends on.

    Attributes:
        owed: e, float32 [rows, columns].
        factor: Q, float32 [columns, rank].
        scale: of the loss, that e is in.
    """

    owed: Tensor
    factor: Tensor
    scale: OwedScale


def memory_for(gradient: Tensor, name: str, rank: int, scaler: Any = None) -> LowRankMemory | None:
    """Where nothing is owed yet. None: it is not worth two factors.

    Args:
        name: of its parameter: the first factor is random, and alike on all ranks.
        rank: of the factors, at least 1.
        scaler: the GradScaler that scales the loss, or None.
    """
    if gradient.dim() < 2 or not gradient.numel():
        return None
    rows, columns = gradient.shape[0], gradient[0].numel()
    rank = min(rank, rows, columns)
    if rank * (rows + columns) > _LARGEST_SHARE * rows * columns:
        return None
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    # Neither the default dtype nor the default device, which are the user's: the generator is of the CPU.
    factor = torch.randn(columns, rank, generator=generator, dtype=torch.float32, device="cpu")
    owed = torch.zeros(rows, columns, dtype=torch.float32, device=gradient.device)
    return LowRankMemory(owed, factor.to(gradient.device), OwedScale(scaler))


class PowerSGD(PrescaledOp):
    """The lines at the head of this file, for one bucket.

    Args:
        memories: of the bucket's tensors, in their order; None: summed as it is.
    """

    inline = False

    def __init__(self, communicator: BaguaCommunicator, memories: Sequence[LowRankMemory | None]) -> None:
        self._communicator = communicator
        self._memories = list(memories)
        self.prescale: float = 1.0 / communicator.nranks()

    @torch.no_grad()
    def run(self, bucket: Bucket) -> None:
        pairs = list(zip(bucket.views, self._memories, strict=True))
        low_rank = [(view, memory) for view, memory in pairs if memory is not None]
        exact = [view for view, memory in pairs if memory is None]
        for view, memory in low_rank:
            if (change := memory.scale.update(view.device)) is not None:
                memory.owed.mul_(change)
            memory.owed.add_(view.reshape(memory.owed.shape))
        products = [memory.owed @ memory.factor for _, memory in low_rank]
        sums = self._sums([*products, *(view.float() for view in exact)])
        for view, mean in zip(exact, sums[len(low_rank) :], strict=True):
            view.copy_(mean)
        bases = [torch.linalg.qr(product).Q for product in sums[: len(low_rank)]]
        factors = self._sums([memory.owed.T @ base for (_, memory), base in zip(low_rank, bases, strict=True)])
        for (view, memory), base, factor in zip(low_rank, bases, factors, strict=True):
            view.copy_((base @ factor.T).view(view.shape))
            # What is not finite is forgotten: all ranks lose this step.
            sent = view.reshape(memory.owed.shape)
            memory.owed.sub_(sent, alpha=self.prescale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            memory.factor.copy_(torch.where(factor.isfinite().all(), factor, memory.factor))

    def _sums(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Over the ranks, of float32 tensors, which are sent together."""
        if not sum(part.numel() for part in parts):
            return list(parts)
        flat = torch.cat([part.flatten() for part in parts])
        sum_over_ranks(flat, self._communicator)
        sums = torch.split(flat, [part.numel() for part in parts])
        return [one.view(part.shape) for one, part in zip(sums, parts, strict=True)]
