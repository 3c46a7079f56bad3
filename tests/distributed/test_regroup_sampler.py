"""RegroupSampler: which samples are trained, how often, when ranks are lost at any point."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.regrouped import (
    LAYERS,
    SMALL_BUCKETS,
    Kill,
    die,
    drawn_kills,
    dying,
    job_store,
    join_job,
    on_cpus,
    run_job,
)
from support.sweeps import rest_is_deep
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import bagua.torch_api as bagua
from bagua.regroup.job_step import WorldChange

SAMPLES, BATCH, EPOCHS, RANKS = 62, 3, 3, 4


class Numbers(Dataset[int]):
    """The n-th sample is n."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Counts(nn.Module):
    """Its parameters say how often each sample was trained, on all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(SAMPLES)) for _ in range(LAYERS)])
        self.register_buffer("broadcast_before_each_pass", torch.zeros(1))

    def forward(self, samples: Tensor) -> Tensor:
        return -sum((weight[samples].sum() for weight in self.layers), torch.zeros(()))


def wrapped(how: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    net = Counts()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce", average=False)
    if how == "wrapper":
        return (
            net,
            optimizer,
            bagua.data_parallel.DistributedDataParallel(
                net, optimizers=[optimizer], algorithm=algorithm, bucket_cap_mb=128 / 2**20
            ),
        )
    return net, optimizer, bagua.with_bagua(net, [optimizer], algorithm)


def count_samples(
    kills: list[Kill],
    how: str,
    accumulation: int,
    drop_last: bool,
    loading: dict[str, Any],
    joins_at: int = 0,
    on_loss: str = "drop",
) -> list[tuple[int, int, list[int]]]:
    """At each end of an epoch: the step, the number of ranks, and how often each sample was trained so far. The last
    rank joins when the others have come to step `joins_at`; these make more epochs until it is there."""
    rank, store = int(os.environ["RANK"]), job_store()
    are_all_there = not joins_at or rank == RANKS - 1
    if joins_at and rank == RANKS - 1:
        store.wait([f"step {joins_at}"])
        options = bagua.Regroup(min_ranks=1, on_loss=on_loss)
        bagua.init_process_group(regroup=options, timeout=60, backend="gloo")
    else:
        join_job(min_ranks=1, on_loss=on_loss)
    mine = next((one for one in kills if one.rank == rank), None)
    net, optimizer, model = wrapped(how)
    no_sync = model.no_sync if how == "wrapper" else model.bagua_ddp.no_sync
    sampler = bagua.contrib.RegroupSampler(Numbers(), seed=5, drop_last=drop_last, accumulation=accumulation)
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=sampler, **loading)
    if rank == 0:
        next(iter(loader))  # a look at a batch changes nothing
    ends = []

    def note(change: WorldChange) -> None:
        nonlocal are_all_there
        are_all_there |= bool(change.joined_ranks)

    model.on_regroup(note)
    has_begun = False  # one that joins late makes the epoch to its end in which the others are
    while not has_begun or sampler.epoch < EPOCHS or not are_all_there:
        has_begun = True
        for number, samples in enumerate(loader, 1):
            if joins_at:
                store.set(f"step {bagua.regroup_step()}", b"")
                time.sleep(0.02)  # leaves the processors to the one that joins
            with dying(mine, bagua.regroup_step(), net, optimizer):
                if number % accumulation:
                    with no_sync():
                        model(samples).backward()
                    continue
                if mine is not None and mine.point == "drawn" and bagua.regroup_step() >= mine.step:
                    die()  # others may be in the broadcast of buffers
                model(samples).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(torch.equal(one, net.layers[0]) for one in net.layers)
        ends.append((bagua.regroup_step(), dist.get_world_size(), net.layers[0].int().tolist()))
        sampler.set_epoch(sampler.epoch + 1)
    return ends


def check_counts(results: list[Any], accumulation: int, drop_last: bool) -> None:
    left = [one for one in results if one is not None]
    assert all(one == left[0] for one in left)
    before = [0] * SAMPLES
    for _, _, counts in left[0]:
        trained = [now - then for now, then in zip(counts, before, strict=True)]
        step = len(results) * BATCH * accumulation
        if drop_last:
            assert max(trained) == 1
            assert SAMPLES - sum(trained) < step
        else:
            # Some may have been repeated to fill a step that another loss made needless.
            assert min(trained) == 1
            assert sum(trained) - SAMPLES < 2 * step
        before = counts


@on_cpus("its samples and their order are made there")
@pytest.mark.parametrize("seed", rest_is_deep(range(200), 3, 5))
def test_each_sample_is_trained_once_an_epoch(seed: int) -> None:
    kills = drawn_kills(seed, 4, 2, 16)
    if seed % 4 == 3:
        kills = [one._replace(point="drawn") for one in kills]
    loading: dict[str, Any] = {}
    if seed % 2:
        loading = {"num_workers": 2, "persistent_workers": seed % 3 == 0, "prefetch_factor": 1 + seed % 4}
    how, accumulation, drop_last = ("with_bagua", "wrapper")[seed % 4 // 2], 1 + (seed % 5 == 3), seed % 3 == 1
    results = run_job(
        4,
        count_samples,
        kills,
        how,
        accumulation,
        drop_last,
        loading,
        0,
        "repeat" if seed % 4 in (1, 2) else "drop",
        env=SMALL_BUCKETS,
        expect_death={one.rank for one in kills},
    )
    check_counts(results, accumulation, drop_last)


@on_cpus("its samples and their order are made there")
@pytest.mark.parametrize(
    ("how", "loading", "kills"),
    rest_is_deep(
        [
            ("with_bagua", {"num_workers": 2}, [Kill(1, 2, "gradient 2")]),
            ("with_bagua", {}, []),
            ("wrapper", {"num_workers": 2, "persistent_workers": True}, []),
            ("wrapper", {}, [Kill(1, 12, "gradient 2")]),
            ("with_bagua", {"num_workers": 1}, [Kill(0, 13, "gradient 1")]),
        ],
        0,
    ),
)
def test_one_that_joins_takes_its_part_of_what_is_left(how: str, loading: dict[str, Any], kills: list[Kill]) -> None:
    dead = {one.rank for one in kills}
    results = run_job(
        *(RANKS - 1, count_samples, kills, how, 1, False, loading, 4),
        joiners=1,
        env=SMALL_BUCKETS,
        expect_death=dead,
    )
    (*members, joined) = results
    first = next(one for one in members if one is not None)
    assert first[-len(joined) :] == joined
    check_counts([first, *members[1:], first], 1, False)
    assert joined[-1][1] == RANKS - len(dead)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train_with_fixed_samplers() -> tuple[list[str], str]:
    rank = join_job(min_ranks=1)
    log = Lines()
    logging.getLogger("bagua").addHandler(log)
    _, optimizer, model = wrapped("with_bagua")
    of_this_rank_alone = DistributedSampler(Numbers(), num_replicas=1, rank=0)
    of_an_evaluation: Any = DistributedSampler(Numbers())
    told = ""
    while bagua.regroup_step() < 5 and not told:
        if rank == 2 and bagua.regroup_step() == 1:
            die()
        if rank == 3 and bagua.regroup_step() == 3:
            die()
        loss = model(torch.tensor(list(of_this_rank_alone)))
        try:
            loss.backward()
        except RuntimeError as error:
            told = str(error)
        optimizer.step()
        of_an_evaluation = None
        if bagua.regroup_step() == 3:
            of_an_evaluation = bagua.contrib.LoadBalancingDistributedSampler(Numbers(), complexity_fn=float)
    assert of_an_evaluation is not None
    return [one for one in log.lines if "DistributedSampler" in one], told


@on_cpus("its samples and their order are made there")
def test_samplers_for_a_fixed_number_of_ranks_are_told_and_end_the_job_at_a_loss() -> None:
    first, second, *_ = run_job(4, train_with_fixed_samplers, expect_death={2, 3})
    assert first == second
    (warning,), told = first
    assert warning.startswith("regroup: DistributedSampler hands out samples to a fixed number of ranks.")
    # Not at the first loss, when there was none.
    assert told.startswith("regroup: 1 of 3 ranks are gone, and LoadBalancingDistributedSampler would hand out")


def train_and_evaluate() -> tuple[int, int, list[str]]:
    rank = join_job(min_ranks=1)
    log = Lines()
    logging.getLogger("bagua").addHandler(log)
    _, optimizer, model = wrapped("with_bagua")
    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=bagua.contrib.RegroupSampler(Numbers()))
    for samples in loader:
        model(samples).backward()
        optimizer.step()
        if bagua.regroup_step() == 2:
            of_an_evaluation = DistributedSampler(Numbers(), shuffle=False)
            if rank == 2:
                die()
            with pytest.raises(bagua.Regrouped):
                dist.all_reduce(torch.tensor(len(of_an_evaluation)))
    return dist.get_world_size(), bagua.regroup_step(), [one for one in log.lines if "DistributedSampler" in one]


def test_a_loss_in_an_evaluation_does_not_end_the_job() -> None:
    first, second, *_ = run_job(3, train_and_evaluate, expect_death={2})
    assert first == second
    ranks, steps, (warning,) = first
    assert (ranks, steps) == (2, 2 + -(-(SAMPLES - 2 * 3 * BATCH) // (2 * BATCH)))
    assert warning.startswith("regroup: DistributedSampler hands out samples to a fixed number of ranks.")
    assert "evaluation" in warning
