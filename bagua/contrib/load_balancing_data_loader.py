"""Samplers that give all ranks equally expensive samples in the same step, so that none waits for another.

The samples are sorted by cost and cut into chunks of one sample per rank. Chunks are shuffled, not samples: in each
step all ranks have neighbours in the order of costs. A sampler is an object of one process and one thread; ranks agree
because they compute the same order, from the same costs, seed and epoch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from bagua.contrib.resumable_sampler import ResumableSampler, refuse_second_split
from bagua.misuse import check_flags, check_integers, explains_calls, shown

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]

_MOST = (1 << 63) - 1  # that torch.randint takes
_WITH_SHARES = (
    "For ranks of different speed, use BalancedSampler(dataset, batch_size=512, complexity_fn=...) of"
    " bagua.torch_api.contrib: it has shares, and samples of similar cost in each global batch."
)


class LoadBalancingDistributedSampler(ResumableSampler[int], DistributedSampler[int]):
    """
    Indices of samples for this rank, such that all ranks have samples of similar cost at the same time.

    It is one of torch's DistributedSamplers, so that Lightning does not split its indices again.

    All ranks get equally many samples. If they differ in speed, use a BalancedSampler with a `complexity_fn`, such as
    `DataLoader(dataset, batch_sampler=BalancedSampler(dataset, batch_size=512, complexity_fn=len))`: the samples of a
    global batch have similar costs, and a fast rank gets more of them.

    Costs are evaluated once, for all samples on each rank. A rank gets ceil(len(dataset) / num_replicas) indices:
    to fill the last chunk, samples are repeated, beginning with the cheapest.

    Args:
        dataset: what costs are computed from; anything with a length and items. It need not be the dataset that is
            loaded: a list of costs by index is enough, with `complexity_fn=float`.
        complexity_fn: the cost of `dataset[index]`, in any unit: a number of any type, also as a tensor or array with
            one element. It must give the same number on all ranks.
        num_replicas: default: the world size.
        rank: default: that of this process.
        shuffle: the order of the chunks, by `seed` and epoch; otherwise from cheap to expensive in each epoch.
        seed: the same on all ranks.
        drop_last: give each rank floor(len(dataset) / num_replicas) indices instead of repeating samples. Those left
            out are the most expensive.
        random_level: in shuffling, a random integer up to this share of the difference between the highest and the
            lowest cost is added to each cost before sorting. 0: chunks have the same samples in each epoch. 1: almost
            no balance.

    Raises:
        RuntimeError: num_replicas or rank is not given, and torch.distributed is not initialized.
        TypeError: a cost is not a number, or an argument has the wrong type.
        ValueError: num_replicas, rank or random_level is out of range, or a cost is not finite.
    """

    @explains_calls(
        "Call LoadBalancingDistributedSampler(dataset, complexity_fn=len), with other arguments by their names.",
        shares=_WITH_SHARES,
    )
    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        ResumableSampler.__init__(self)
        if (num_replicas is None or rank is None) and not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "num_replicas and rank are not both given, and torch.distributed is not initialized.\n"
                "Call bagua.torch_api.init_process_group() before making the sampler, or give both."
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
        check_integers(num_replicas=num_replicas, rank=rank, seed=seed)
        check_flags(shuffle=shuffle, drop_last=drop_last)
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}, must be at least 1")
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"rank is {rank}, must be between 0 and {num_replicas - 1}, as num_replicas={num_replicas}"
            )
        level: Any = random_level
        if not isinstance(level, numbers.Real):
            raise TypeError(f"random_level is {shown(random_level)}. Pass a number between 0 and 1.")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level is {random_level}, must be between 0 and 1")
        DistributedSampler.__init__(self, dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.random_level = random_level
        self._costs = costs_of(dataset, complexity_fn)

    def set_epoch(self, epoch: int) -> None:
        """The order of iterators that begin from now on. The same on all ranks."""
        self.epoch = epoch

    def chunks(self) -> list[list[int]]:
        """
        The epoch of all ranks.

        Returns:
            `num_samples` lists of `num_replicas` indices, in order: rank r has the r-th of each.
        """
        if not self.shuffle:
            return self._cut(self._costs)
        generator = torch.Generator("cpu").manual_seed(self.seed + self.epoch)
        chunks = self._cut(self._noisy_costs(generator) if self._costs else [])
        order = torch.randperm(len(chunks), generator=generator, device="cpu")
        return [chunks[number] for number in order.tolist()]

    def _noisy_costs(self, generator: torch.Generator) -> Sequence[float | Fraction]:
        """With what random_level adds."""
        costs: Sequence[float | Fraction] = self._costs
        low, high = min(costs), max(costs)
        try:
            most = int((high - low) * self.random_level + 1)
        except (OverflowError, ValueError):  # larger than floating point can be
            costs = [Fraction(cost) for cost in costs]
            most = int((Fraction(high) - Fraction(low)) * Fraction(self.random_level)) + 1
        drawn = torch.randint(min(most, _MOST), (len(costs),), generator=generator, device="cpu").tolist()
        if most > _MOST:
            costs, drawn = [Fraction(cost) for cost in costs], [extra * most // _MOST for extra in drawn]
        return [cost + extra for cost, extra in zip(costs, drawn, strict=True)]

    def _cut(self, costs: Sequence[float | Fraction]) -> list[list[int]]:
        ordered = sorted(range(len(costs)), key=costs.__getitem__)  # stable
        filled = itertools.islice(itertools.cycle(ordered), self.num_samples * self.num_replicas)
        return [list(chunk) for chunk in zip(*[filled] * self.num_replicas, strict=True)]

    def _epoch_items(self) -> Sequence[int]:
        refuse_second_split(self.rank, self.num_replicas)
        return [chunk[self.rank] for chunk in self.chunks()]

    def _settings(self) -> dict[str, Any]:
        names = ("num_replicas", "shuffle", "seed", "drop_last", "random_level")
        return {"samples": len(self._costs), **{name: getattr(self, name) for name in names}}

    def __len__(self) -> int:
        """Of a whole epoch, also after `load_state_dict`."""
        return self.num_samples


class LoadBalancingDistributedBatchSampler(ResumableSampler[list[int]]):
    """
    Batches of a sampler's indices, of sizes that `batch_fn` chooses; equally many on all ranks, whatever their speed.

    Args:
        sampler: with `drop_last=False`.
        batch_fn: cuts a rank's indices into batches. It is called for all ranks on each rank, so that all know how many
            batches the others have, and must depend on its argument alone.
        drop_last: leave out the last batches of ranks that have more than others. Otherwise ranks with fewer repeat
            theirs, from the first on.

    Raises:
        TypeError: `sampler` is not a LoadBalancingDistributedSampler, `batch_fn` is not a function, or `drop_last`
            neither True nor False.
        ValueError: `sampler.drop_last` is set. When an epoch begins: a rank has no batches although others do, without
            `drop_last`.
    """

    @explains_calls(
        "Call LoadBalancingDistributedBatchSampler(sampler, batch_fn), with drop_last by its name.", shares=_WITH_SHARES
    )
    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[list[int]]],
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}, must be a LoadBalancingDistributedSampler")
        if not callable(batch_fn):
            raise TypeError(f"batch_fn is {shown(batch_fn)}. Pass a function of indices that returns batches of them.")
        check_flags(drop_last=drop_last)
        if sampler.drop_last:
            raise ValueError(
                "sampler.drop_last is True, must be False: to leave out batches, give drop_last to the batch sampler"
            )
        self.sampler, self.batch_fn, self.drop_last = sampler, batch_fn, drop_last
        self._batches: tuple[int, Sequence[list[int]]] | None = None  # of an epoch

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """That of the sampler."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """That of the sampler: the order of iterators that begin from now on. The same on all ranks."""
        self.sampler.set_epoch(epoch)

    def _epoch_items(self) -> Sequence[list[int]]:
        refuse_second_split(self.sampler.rank, self.sampler.num_replicas)
        if self._batches is None or self._batches[0] != self.epoch:
            self._batches = self.epoch, self._make_batches()
        return self._batches[1]

    def _make_batches(self) -> Sequence[list[int]]:
        chunks = self.sampler.chunks()
        by_rank = [self.batch_fn([chunk[rank] for chunk in chunks]) for rank in range(self.sampler.num_replicas)]
        counts = [len(batches) for batches in by_rank]
        if not self.drop_last and min(counts) == 0 < max(counts):
            raise ValueError(
                f"batch_fn gave no batches for rank {counts.index(0)}, and {max(counts)} for rank"
                f" {counts.index(max(counts))}.\nThe rank got {len(chunks)} samples in epoch {self.epoch}, and has"
                " nothing to repeat.\nLet batch_fn return all indices that it gets, or give drop_last=True."
            )
        number = min(counts) if self.drop_last else max(counts)
        return list(itertools.islice(itertools.cycle(by_rank[self.sampler.rank]), number))

    def _settings(self) -> dict[str, Any]:
        return {**self.sampler._settings(), "drop_last": self.drop_last}


def costs_of(dataset: Any, complexity_fn: Callable[[Any], Any]) -> list[int | float | Fraction]:
    """Of each sample.

    Raises:
        TypeError: complexity_fn is no function, or did not return a number.
        ValueError: a number is not finite.
    """
    if not callable(complexity_fn):
        raise TypeError(f"complexity_fn is {complexity_fn!r}. Pass a function of a sample that returns its cost.")
    return [_cost(complexity_fn, dataset, index) for index in range(len(dataset))]


def order_by_cost(
    costs: Sequence[float | Fraction], batch_size: int, generator: torch.Generator | None = None
) -> list[int]:
    """
    The samples of an epoch, such that each batch of them has similar costs.

    Args:
        generator: of the order of the batches, of that in each, and of which samples are left for a smaller last one;
            without, from cheap to expensive.
    """
    ordered = sorted(range(len(costs)), key=costs.__getitem__)  # stable
    if generator is None:
        return ordered

    def drawn(number: int) -> list[int]:
        found: list[int] = torch.randperm(number, generator=generator, device="cpu").tolist()
        return found

    batches, rest = divmod(len(ordered), batch_size)
    begin = batch_size * drawn(batches + 1)[0]
    left = ordered[begin : begin + rest]
    del ordered[begin : begin + rest]
    whole = [ordered[batch_size * number : batch_size * (number + 1)] for number in drawn(batches)]
    return [batch[place] for batch in (*whole, left) for place in drawn(len(batch))]


def _cost(complexity_fn: Callable[[Any], Any], dataset: Any, index: int) -> int | float | Fraction:
    """As a number of Python, with which sums do not overflow.

    Raises:
        TypeError: complexity_fn did not return a number.
        ValueError: the number is not finite.
    """
    given = complexity_fn(dataset[index])
    cost = given
    if hasattr(given, "item"):  # of torch, numpy and others
        with contextlib.suppress(RuntimeError, ValueError, TypeError):  # it has several elements, or none, or is meta
            cost = given.item()
    if isinstance(cost, Fraction):
        return cost
    if isinstance(cost, numbers.Integral):
        return int(cost)
    if not isinstance(cost, numbers.Real):
        raise TypeError(
            f"complexity_fn returned {given!r} for dataset[{index}], a {type(given).__name__}; it must return a "
            "number, or a tensor or array of one"
        )
    if not math.isfinite(cost):
        raise ValueError(f"complexity_fn returned {given} for dataset[{index}]; costs must be finite")
    return float(cost)
