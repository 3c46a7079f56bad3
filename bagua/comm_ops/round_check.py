"""A check that ranks which meet after local steps are in the same round: an operation of a bucket."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from bagua.job import torch_internals

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator
    from bagua.engine.bucket import Bucket


class RoundCheck:
    """Every rank tells the number of its round, what it exchanges and how its outer optimizer steps, so that ranks that
    are not in step are named, and their weights not mixed.

    Args:
        communicator: of all ranks.
        number: called when the exchange begins; 1 in the first round.
        names: likewise; of the parameters that are exchanged.
        outer_options: likewise; class and options of the outer optimizer, "" for none.
    """

    inline = False

    def __init__(
        self,
        communicator: BaguaCommunicator,
        number: Callable[[], int],
        names: Callable[[], Iterable[str]],
        outer_options: Callable[[], str],
    ) -> None:
        self._communicator = communicator
        self._number = number
        self._names = names
        self._outer_options = outer_options
        # As this rank has told them: names, and outer options.
        self._exchanged = self._mine = ""
        self._told: torch.Tensor | None = None

    def run(self, bucket: Bucket) -> None:
        ranks = self._communicator.nranks()
        device = bucket.flattened_tensor().device
        self._told = torch.empty(3 * ranks, dtype=torch.int64, device=device)
        self._exchanged, self._mine = ", ".join(self._names()), self._outer_options()
        # Filled on the device: a copy from the host would wait for what the device does.
        mine = torch.empty(3, dtype=torch.int64, device=device)
        mine[0].fill_(self._number())
        mine[1].fill_(_digest(self._exchanged))
        mine[2].fill_(_digest(self._mine))
        torch_internals.all_gather_flat(self._told, mine, group=self._communicator.torch_group)
        if device.type == "cpu":  # else the host would wait for the peers
            self.check()

    def check(self) -> None:
        """The exchange was waited for.

        Raises:
            RuntimeError: the ranks are in different rounds, exchange different parameters, or have different outer
                optimizers.
        """
        told, self._told = self._told, None
        if told is None:
            return
        numbers, contents, digests = told.view(-1, 3).t().tolist()
        if len(set(numbers)) > 1:
            rounds = ", ".join(
                f"rank {rank}: {number}" for rank, number in zip(self._communicator.ranks, numbers, strict=True)
            )
            raise RuntimeError(
                f"The ranks exchange weights in different rounds ({rounds}).\n"
                "A rank began with another state than the others, or made another number of steps.\n"
                "Load the same checkpoint on all ranks, and give all ranks the same number of batches."
            )
        others = self._others(contents, self._exchanged)
        if others:
            raise RuntimeError(
                f"Ranks {others} exchange other parameters than this rank, which exchanges {self._exchanged}.\n"
                "A rank has frozen or unfrozen parameters that the others have not.\n"
                "Freeze and unfreeze the same parameters on all ranks, before the same forward pass."
            )
        others = self._others(digests, self._mine)
        if others:
            raise RuntimeError(
                f"The outer optimizers of ranks {others} have another class or other options than this rank's, which is"
                f" {self._mine}.\n"
                "The weights would drift apart. Make the same outer optimizer on all ranks, and change its options"
                " on all of them in the same round."
            )

    def _others(self, told: Sequence[int], mine: str) -> list[int]:
        """The ranks that have told something else."""
        return [rank for rank, one in zip(self._communicator.ranks, told, strict=True) if one != _digest(mine)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
