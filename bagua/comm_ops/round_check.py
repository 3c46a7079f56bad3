"""A check that ranks which meet after local steps are in the same round: an operation of a bucket."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from bagua.job import torch_internals

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.engine.bucket import Bucket


class RoundCheck:
    """Every rank tells the number of its round and how its outer optimizer steps, so that ranks that are not in step
    are named, and their weights not mixed.

    Args:
        communicator: of all ranks.
        number: called when the exchange begins; 1 in the first round.
        outer_options: likewise; class and options of the outer optimizer, "" for none.
    """

    inline = False

    def __init__(
        self, communicator: BaguaCommunicator, number: Callable[[], int], outer_options: Callable[[], str]
    ) -> None:
        self._communicator = communicator
        self._number = number
        self._outer_options = outer_options
        self._mine = ""  # outer options, as this rank has told them
        self._told: torch.Tensor | None = None

    def run(self, bucket: Bucket) -> None:
        ranks = self._communicator.nranks()
        device = bucket.flattened_tensor().device
        self._told = torch.empty(2 * ranks, dtype=torch.int64, device=device)
        self._mine = self._outer_options()
        # Filled on the device: a copy from the host would wait for what the device does.
        mine = torch.empty(2, dtype=torch.int64, device=device)
        mine[0].fill_(self._number())
        mine[1].fill_(_digest(self._mine))
        torch_internals.all_gather_flat(self._told, mine, group=self._communicator.torch_group)
        if device.type == "cpu":  # else the host would wait for the peers
            self.check()

    def check(self) -> None:
        """The exchange was waited for.

        Raises:
            RuntimeError: the ranks are in different rounds, or have different outer optimizers.
        """
        told, self._told = self._told, None
        if told is None:
            return
        numbers, digests = told.view(-1, 2).t().tolist()
        if len(set(numbers)) > 1:
            rounds = ", ".join(
                f"rank {rank}: {number}" for rank, number in zip(self._communicator.ranks, numbers, strict=True)
            )
            raise RuntimeError(
                f"The ranks exchange weights in different rounds ({rounds}).\n"
                "A rank began with another state than the others, or made another number of steps.\n"
                "Load the same checkpoint on all ranks, and give all ranks the same number of batches."
            )
        mine = _digest(self._mine)
        others = [rank for rank, one in zip(self._communicator.ranks, digests, strict=True) if one != mine]
        if others:
            raise RuntimeError(
                f"The outer optimizers of ranks {others} have another class or other options than this rank's, which is"
                f" {self._mine}.\n"
                "The weights would drift apart. Make the same outer optimizer on all ranks, and change its options"
                " on all of them in the same round."
            )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
