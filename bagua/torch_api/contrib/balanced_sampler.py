"""Batches by speed: a rank that computes twice as fast gets twice as many samples of each global batch.

A global batch is `batch_size` samples of the epoch's order, which all ranks know. It is cut into a part for each rank,
so a position in the epoch is a number of global batches, whatever the parts were before.

Speed is samples by time of computing. The engine of the wrapped module measures a step, less what it waits for in its
communication: so a rank is not slow because another one is. Medians, so a slow step (a checkpoint, a compile) counts
for nothing. Parts change where that makes a step faster by 5 % at least: noise of equal ranks does not move them.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import torch
import torch.distributed as dist

from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.object_collectives import all_gather_object
from bagua.collectives.process_group import group_for, to_bagua_process_group
from bagua.contrib.load_balancing_data_loader import costs_of, order_by_cost
from bagua.contrib.resumable_sampler import ResumableSampler
from bagua.engine.data_parallel import DataParallelEngine, own_computing
from bagua.engine.gradient_owners import owners_by_name
from bagua.engine.speed_shares import LEAST_STEPS, are_known, is_worth, parts_of, shares_of
from bagua.engine.step_statistics import COMPARABLE
from bagua.job import torch_internals
from bagua.job.failure_report import failures_named
from bagua.misuse import check_flags, check_integers


class BalancedSampler(ResumableSampler[list[int]]):
    """
    This rank's part of each global batch: `DataLoader(data, batch_sampler=BalancedSampler(data, batch_size=512))`.

    Wrap the model with batch weights (`count_batch=True` or `batch_weights=True`), so that each sample counts the same.
    Call `set_epoch(epoch)` before each epoch.

    Args:
        dataset: what has a length, the same on all ranks.
        batch_size: samples of a global batch, of all ranks together, not of one rank; at least one for each rank.
        shares: "auto": by the speeds of the ranks, from equal parts on. Or a positive number for each rank: [2, 1]
            gives the first rank two thirds.
        every: the parts change after so many batches at the earliest. They are agreed on then, by one small exchange.
            The first one compares the arguments of the ranks as well.
        seed: of the order, which also depends on the epoch. The same on all ranks.
        shuffle: otherwise in the order of the dataset.
        drop_last: leave out the last batch of an epoch if it is smaller. It is left out anyway if it has fewer samples
            than there are ranks.
        complexity_fn: the cost of `dataset[index]`, as that of LoadBalancingDistributedSampler. Given, the samples of a
            global batch have similar costs; without `shuffle`, from cheap to expensive. It is evaluated once, for all
            samples on each rank.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: `batch_size`, `every` or `seed` is not an integer, `shuffle` or `drop_last` neither True nor False,
            `shares` are neither a word nor numbers, or a cost is not a number.
        ValueError: `batch_size` is below the number of ranks, `every` below 8, `shares` are not as many positive
            numbers, or a cost is not finite. While it is iterated: the ranks have other arguments.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shares: str | Sequence[float] = "auto",
        every: int = 50,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        complexity_fn: Callable[[Any], float] | None = None,
    ) -> None:
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "BalancedSampler: torch.distributed is not initialized.\n"
                "Call bagua.torch_api.init_process_group() before making the sampler."
            )
        self._group = to_bagua_process_group(None)
        ranks = self._group.size
        check_integers(batch_size=batch_size, every=every, seed=seed)
        check_flags(shuffle=shuffle, drop_last=drop_last)
        if batch_size < ranks:
            raise ValueError(f"batch_size={batch_size} must be at least {ranks}, one sample for each rank.")
        if every < 2 * LEAST_STEPS:
            raise ValueError(f"every={every} must be at least {2 * LEAST_STEPS} batches, so that speeds are known.")
        self.is_automatic = isinstance(shares, str)
        given = shares_of(shares, ranks)
        self.dataset, self.batch_size, self.every = dataset, batch_size, every
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._costs = None if complexity_fn is None else costs_of(dataset, complexity_fn)
        self.epoch = 0
        self._shares = given
        self._since_change = 0  # batches
        self._has_warned = False
        self._is_compared = False  # with those of the other ranks

    @property
    def parts(self) -> list[int]:
        """Samples of a global batch, by rank."""
        return parts_of(self.batch_size, self._shares)

    def set_epoch(self, epoch: int) -> None:
        """The order of iterators that begin from now on. The same on all ranks."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Global batches of an epoch, also after `load_state_dict`."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (not self.drop_last and rest >= self._group.size)

    def _epoch_items(self) -> Sequence[list[int]]:
        raise AssertionError("the parts of later batches are not known")

    def __iter__(self) -> Iterator[list[int]]:
        if not self._is_resuming:
            self._place = (self.epoch, 0)
        return self._batches(self.epoch)

    def _batches(self, epoch: int) -> Iterator[list[int]]:
        start = self._begin(epoch)
        self._warn_without_weights()
        order = self._order(epoch)
        rank = self._group.get_global_communicator().rank()
        for number in range(start, len(self)):
            if self._since_change >= self.every:
                self._change()
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            parts = parts_of(len(batch), self._shares)
            begin = sum(parts[:rank])
            self._place = (epoch, number + 1)
            self._since_change += 1
            yield list(batch[begin : begin + parts[rank]])

    def _order(self, epoch: int) -> Sequence[int]:
        generator = torch.Generator("cpu").manual_seed(self.seed + epoch) if self.shuffle else None
        if self._costs is not None:
            return order_by_cost(self._costs, self.batch_size, generator)
        if generator is None:
            return range(len(self.dataset))
        shuffled: list[int] = torch.randperm(len(self.dataset), generator=generator, device="cpu").tolist()
        return shuffled

    # --- shares ------------------------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Collective, on the thread that iterates."""
        self._since_change = 0
        if self._group.size == 1 or (self._is_compared and not self.is_automatic):
            return
        communicator = group_for("parts of a BalancedSampler", self._group).get_global_communicator()
        if not self._is_compared:
            self._compare(communicator)
        if not self.is_automatic:
            return
        device = communicator.device
        # The second half: batches that a DataLoader had fetched were of the parts before.
        steps = self.every // 2 if device.type == "cpu" else max(self.every // 2, COMPARABLE)
        own = torch.tensor([_computing_s(steps)], dtype=torch.float64, device="cpu")
        everybody = torch.empty(self._group.size, dtype=torch.float64, device=device)
        with failures_named(self._group, "agreeing on the parts of batches"):
            torch_internals.all_gather_flat(everybody, own.to(device), group=communicator.torch_group)
        times = everybody.tolist()
        parts = self.parts
        if are_known(times) and is_worth(parts, times):
            self._shares = [part / seconds for part, seconds in zip(parts, times, strict=True)]
            self._warn_without_weights()

    def _compare(self, communicator: BaguaCommunicator) -> None:
        """Collective.

        Raises:
            ValueError: ranks have made it with other arguments; on all ranks.
        """
        own = {**self._settings(), "epoch": self._place[0], "shares": self._shares}
        everybody = all_gather_object(own, communicator)
        self._is_compared = True
        for rank, theirs in enumerate(everybody):
            for name, value in everybody[0].items():
                if theirs[name] != value:
                    raise ValueError(
                        f"BalancedSampler: ranks divide different batches, so that samples are left out or come twice:"
                        f" {name} is {value} on rank {communicator.ranks[0]}, and {theirs[name]} on rank"
                        f" {communicator.ranks[rank]}.\n"
                        "Make it with the same arguments on all ranks, for a dataset of the same length."
                    )

    def _warn_without_weights(self) -> None:
        if self._has_warned or len(set(self.parts)) == 1:
            return
        without = [name for name, engine in _engines() if engine.setup.loss is None]
        if without:
            self._has_warned = True
            warnings.warn(
                f"BalancedSampler: the parts of a batch are {self.parts}, and {', '.join(without)} averages over ranks"
                " without weights, so that samples of small parts count more. Wrap it with count_batch=True.",
                stacklevel=2,
            )

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """
        Returns:
            "epoch", "position" (global batches that have been given in it), "settings", and "shares", by which later
            batches are divided.
        """
        return {**super().state_dict(), "shares": list(self._shares), "since_change": self._since_change}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As of all resumable samplers, and the shares: the batches that follow are divided as they would have been.

        Raises:
            KeyError, ValueError: as of ResumableSampler.
        """
        shares = [float(one) for one in state_dict["shares"]]
        super().load_state_dict(state_dict)
        self._shares, self._since_change = shares, int(state_dict["since_change"])

    def _settings(self) -> dict[str, Any]:
        names = ("batch_size", "every", "seed", "shuffle", "drop_last")
        return {
            "samples": len(self.dataset),
            "ranks": self._group.size,
            "costs": None if self._costs is None else f"{zlib.crc32(repr(self._costs).encode()):08x}",  # a checksum
            **{name: getattr(self, name) for name in names},
        }


def _engines() -> list[tuple[str, DataParallelEngine]]:
    engines = [(name, cast("DataParallelEngine", one)) for name, one in sorted(owners_by_name.items())]
    return [(name, one) for name, one in engines if one.is_attached]


def _computing_s(steps: int) -> float:
    """A step of this rank without what it waits for, in s; NaN: not known yet."""
    found = own_computing(steps)
    return found.step_s if found.steps else math.nan
