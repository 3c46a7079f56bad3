"""A check that ranks which meet after local steps are in the same round: an operation of a bucket."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from bagua.collectives.communicator import BaguaCommunicator
from bagua.engine.bucket import Bucket
from bagua.job import torch_internals

_COLUMNS = 5  # of what each rank tells
_UNIT_S = 1e-9


class RoundCheck:
    """Every rank tells the number of its round, what it exchanges and how its outer optimizer steps, so that ranks that
    are not in step are named, and their weights not mixed. And how long its steps take, by which shares are agreed on.

    Args:
        number: called when the exchange begins; 1 in the first round.
        names: likewise; of the parameters that are exchanged.
        outer_options: likewise; class and options of the outer optimizer, "" for none.
        steps: likewise; how many each rank makes in this round, by rank; empty: as many as the others.
        seconds: likewise; that a step of this rank takes; NaN: not known.
    """

    inline = False

    def __init__(
        self,
        communicator: BaguaCommunicator,
        number: Callable[[], int],
        names: Callable[[], Iterable[str]],
        outer_options: Callable[[], str],
        steps: Callable[[], Sequence[int]] = tuple,
        seconds: Callable[[], float] = lambda: math.nan,
    ) -> None:
        self._communicator = communicator
        self._number = number
        self._names = names
        self._outer_options = outer_options
        self._steps, self._seconds = steps, seconds
        # As this rank has told them: names, outer options, and steps.
        self._exchanged = self._mine = self._made = ""
        self._seconds_told: list[float] | None = None
        self._told: torch.Tensor | None = None

    def run(self, bucket: Bucket) -> None:
        ranks = self._communicator.nranks()
        device = bucket.flattened_tensor().device
        self._told = torch.empty(_COLUMNS * ranks, dtype=torch.int64, device=device)
        self._exchanged, self._mine = ", ".join(self._names()), self._outer_options()
        self._made = ", ".join(map(str, self._steps()))
        seconds = self._seconds()
        # Filled on the device: a copy from the host would wait for what the device does.
        mine = torch.empty(_COLUMNS, dtype=torch.int64, device=device)
        mine[0].fill_(self._number())
        mine[1].fill_(_digest(self._exchanged))
        mine[2].fill_(_digest(self._mine))
        mine[3].fill_(_digest(self._made))
        mine[4].fill_(0 if math.isnan(seconds) else max(1, round(seconds / _UNIT_S)))
        torch_internals.all_gather_flat(self._told, mine, group=self._communicator.torch_group)
        if device.type == "cpu":  # else the host would wait for the peers
            self.check()

    def check(self) -> None:
        """The exchange was waited for.

        Raises:
            RuntimeError: the ranks are in different rounds, exchange different parameters, have different outer
                optimizers, or count on different numbers of steps.
        """
        told, self._told = self._told, None
        if told is None:
            return
        numbers, contents, digests, steps, times = told.view(-1, _COLUMNS).t().tolist()
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
        others = self._others(steps, self._made)
        if others:
            raise RuntimeError(
                f"Ranks {others} count on other numbers of steps in this round than this rank, for which they are"
                f" {self._made}, by rank.\n"
                "A rank began with another state than the others.\n"
                "Load the same checkpoint on all ranks."
            )
        self._seconds_told = [_UNIT_S * one if one else math.nan for one in times]

    def take_seconds(self) -> list[float] | None:
        """Of a step, by rank, as told in an exchange that was checked; each once, otherwise None."""
        told, self._seconds_told = self._seconds_told, None
        return told

    def _others(self, told: Sequence[int], mine: str) -> list[int]:
        """The ranks that have told something else."""
        return [rank for rank, one in zip(self._communicator.ranks, told, strict=True) if one != _digest(mine)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
