"""What ranks exchange that meet after a number of local steps: which round it is, and a mean.

Operations of a bucket (bagua.engine.bucket), without threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bagua.comm_ops.weight_exchange import MeanOfAll, as_real
from bagua.job import torch_internals

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.engine.bucket import Bucket


class RoundNumbers:
    """Every rank tells the number of its round, so that ranks that are not in step are named, and their weights not
    mixed.

    Args:
        communicator: of all ranks.
        number: called when the exchange begins.
    """

    inline = False

    def __init__(self, communicator: BaguaCommunicator, number: Callable[[], int]) -> None:
        self._communicator = communicator
        self._number = number
        self._numbers: torch.Tensor | None = None

    def run(self, bucket: Bucket) -> None:
        ranks = self._communicator.nranks()
        device = bucket.flattened_tensor().device
        self._numbers = torch.empty(ranks, dtype=torch.int64, device=device)
        mine = torch.full((1,), self._number(), dtype=torch.int64, device=device)
        torch_internals.all_gather_flat(self._numbers, mine, group=self._communicator.torch_group)
        if device.type == "cpu":  # else the host would wait for the peers
            self.check()

    def check(self) -> None:
        """The exchange was waited for.

        Raises:
            RuntimeError: the ranks are in different rounds.
        """
        numbers, self._numbers = self._numbers, None
        if numbers is None:
            return
        by_rank = numbers.tolist()
        if len(set(by_rank)) > 1:
            rounds = ", ".join(
                f"rank {rank}: {number}" for rank, number in zip(self._communicator.ranks, by_rank, strict=True)
            )
            raise RuntimeError(
                f"The ranks exchange weights in different rounds ({rounds}).\n"
                "A rank began with another state than the others, or made another number of steps.\n"
                "Load the same checkpoint on all ranks, and give all ranks the same number of batches."
            )


class MeanOverRanks:
    """The bucket becomes its mean over all ranks, the same bits on all of them.

    Args:
        communicator: of all ranks.
    """

    inline = False

    def __init__(self, communicator: BaguaCommunicator) -> None:
        ranks = communicator.nranks()
        self._mean = MeanOfAll(communicator, [1 / ranks] * ranks)

    def run(self, bucket: Bucket) -> None:
        flat = bucket.flattened_tensor()
        if flat.numel():
            self._mean.mix(as_real(flat), 0)
