"""`measure balance`: what samplers make of samples with a heavy tail of lengths: the work of the slowest rank, and the
time.

Compared: torch's DistributedSampler; batches of similar lengths as the Transformers library makes them
(group_by_length); LoadBalancingDistributedSampler; and its batch sampler, with a batch_fn that sorts indices window by
window.
A step takes as long as its slowest rank. `imbalance` is that rank's tokens over the mean rank's, over an epoch,
computed exactly from the lengths; `padding` is tokens with padding over tokens without. `busiest rank` is the CPU time
of each step's busiest rank, added up over an epoch of training, and `wall` the time that the epoch takes here: where
each rank has a core, they differ by the communication. Samples are `packed` (no padding) or `padded` to the longest of
the batch.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from bagua.net.bench.api import Label, within
from bagua.torch_api.contrib import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from measure.rank import join_bagua
from measure.runner import Case, Plan, Row, Tool

Batches = list[list[int]]
FORMS = ("packed", "padded")
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


_EXACT_EPOCHS = 5


def lengths_of(samples: int) -> list[int]:
    """Log-normal."""
    spread = torch.randn(samples, generator=torch.Generator().manual_seed(0))
    return [min(2048, max(8, round(64 * math.exp(value)))) for value in spread.tolist()]


def tokens(batch: Sequence[int], lengths: Sequence[int], form: str) -> int:
    found = [lengths[index] for index in batch]
    return sum(found) if form == "packed" else max(found) * len(found)


def exact(name: str, form: str, lengths: Sequence[int], size: int, ranks: int) -> tuple[list[float], list[float]]:
    """(imbalance, padding) of some epochs."""
    imbalance, padding = [], []
    for epoch in range(_EXACT_EPOCHS):
        by_rank = [batches_of(name, lengths, size, ranks, rank, epoch) for rank in range(ranks)]
        steps = [[tokens(batch, lengths, form) for batch in step] for step in zip(*by_rank, strict=True)]
        work = sum(map(sum, steps))
        imbalance.append(ranks * sum(map(max, steps)) / work)
        padding.append(work / sum(tokens(batch, lengths, "packed") for batches in by_rank for batch in batches))
    return imbalance, padding


def prepare(_: torch.device) -> None:
    join_bagua()
    torch.set_num_threads(1)


@functools.cache
def _wrapped(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    model: Any = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    return model, optimizer


def measure(_: torch.device, number: int, **fields: Any) -> dict[str, float]:
    """On a rank: an epoch, after one that warms up the sampler."""
    if (key := (fields["variant"], fields["form"])) not in _warmed_up:
        _warmed_up.add(key)
        _epoch(0, **fields)
    return _epoch(number + 1, **fields)


_warmed_up: set[tuple[str, str]] = set()


def _epoch(epoch: int, variant: str, form: str, samples: int, batch_size: int, width: int) -> dict[str, float]:
    """The CPU time of each step's busiest rank, and the wall time."""
    lengths = lengths_of(samples)
    batches = batches_of(variant, lengths, batch_size, dist.get_world_size(), dist.get_rank(), epoch)
    model, optimizer = _wrapped(width)
    spent = []
    dist.barrier()
    started = time.perf_counter()
    for batch in batches:
        before = time.thread_time()  # that of computing; others communicate
        optimizer.zero_grad()
        model(torch.ones(tokens(batch, lengths, form), width)).square().mean().backward()
        optimizer.step()
        spent.append(time.thread_time() - before)
    dist.barrier()
    wall = time.perf_counter() - started
    busiest = torch.tensor(spent, dtype=torch.float64)
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    return {"busiest_s": float(busiest.sum()), "seconds": wall}


class Balance(Tool):
    name = "balance"
    title = "Samplers on {ranks} ranks, lengths with a heavy tail"
    options = (
        ("samples", within(int, 1, 1_000_000), 1024, "of the data set"),
        ("batch_size", within(int, 1, 10_000), 8, "of each rank"),
        ("width", within(int, 1, 10_000), 128, "of the model's layers"),
    )
    length = (5, 1800.0, None)
    same = ("samples", "batch_size", "width")

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        given.device = "cpu"
        super().check(parser, given)

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__(given)
        lengths = lengths_of(given.samples)

        @functools.cache
        def exactly(row: Row) -> tuple[list[float], list[float]]:
            return exact(row.variant, row.case.form, lengths, given.batch_size, given.ranks)

        def speedup(row: Row) -> list[float]:
            pairs = row.turns.pairs(row.case, SAMPLERS[0], row.variant)
            return [base["busiest_s"] / mine["busiest_s"] for base, mine in pairs]

        self.metrics = (
            ("imbalance", "x", lambda row: exactly(row)[0]),
            ("padding", "x", lambda row: exactly(row)[1]),
            ("busiest_cpu_time", "s", lambda row: row.values("busiest_s")),
            ("time", "s", Row.values),
            ("speedup", "x", speedup),
        )

    def cases(self) -> Plan:
        return {Case(form=form): SAMPLERS for form in FORMS}

    def labels(self, row: Row) -> dict[str, Label]:
        return {"sampler": row.variant, "form": row.case.form, **self.where}


main = Balance.main
