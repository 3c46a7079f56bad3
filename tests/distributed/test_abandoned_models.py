"""Models that are wrapped, trained and dropped one after the other leave nothing: no thread, no file, no group."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import batches, begin, mlp, train
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua.job.torch_internals import registered_groups
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

MODELS = 4
ROUNDS = 3  # a leak grows in each of them
DEADLINE_S = 10.0


def _one_model(name: str, rank: int, device: torch.device) -> None:
    net: Any = mlp(0, device)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if name == "qadam":
        optimizer = QAdamOptimizer(net.parameters(), warmup_steps=2)
        net.with_bagua([optimizer], QAdamAlgorithm(optimizer))
    else:
        net.with_bagua([optimizer], Algorithm.init(name))
    train(net, optimizer, batches(rank, 3, device))
    if name == "async":
        net.bagua_algorithm.abort(net)
    del net, optimizer
    gc.collect()  # modules are cycles


def _counts() -> list[int]:
    """Threads of Python and of the process, files, groups."""
    gc.collect()
    tasks, files = (len(list(Path("/proc/self", folder).iterdir())) for folder in ("task", "fd"))
    return [threading.active_count(), tasks, files, registered_groups()]


def _all_within(counts: Sequence[int], limits: Sequence[int]) -> bool:
    return all(count <= limit for count, limit in zip(counts, limits, strict=True))


@pytest.mark.parametrize(
    "name", ["gradient_allreduce", "bytegrad", "qadam", "decentralized", "low_precision_decentralized", "async"]
)
@on_ranks(2)
def test_what_models_leave_does_not_grow(rank: int, device: torch.device, name: str) -> None:
    """Before and after some models. What the job starts once, whatever models do, may start late: then once more."""
    for _ in range(2):
        _one_model(name, rank, device)
    for _ in range(ROUNDS):
        first = _counts()
        for _ in range(MODELS):
            _one_model(name, rank, device)
        deadline = time.monotonic() + DEADLINE_S
        while not _all_within(last := _counts(), first) and time.monotonic() < deadline:
            time.sleep(0.05)  # threads take a moment to end
        told = [False] * dist.get_world_size()
        dist.all_gather_object(told, _all_within(last, first))
        if all(told):
            break
    assert _all_within(last, first), (first, last)


def _averaged(rank: int, device: torch.device) -> tuple[Any, int]:
    """A model, and how many groups there were when its averaging had ended."""
    net: Any = mlp(0, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.with_bagua([optimizer], Algorithm.init("async"))
    train(net, optimizer, batches(rank, 3, device))
    net.bagua_algorithm.abort(net)
    return net, registered_groups()


def _lost_one_after_the_other() -> list[int]:
    rank, device = begin()
    first, with_first = _averaged(rank, device)
    if rank == 0:
        del first
        gc.collect()
    second, with_second = _averaged(rank, device)
    del second
    if rank == 1:
        del first
    gc.collect()
    _third, with_third = _averaged(rank, device)
    return [with_first, with_second, with_third]


def test_a_group_is_destroyed_when_all_ranks_have_lost_it() -> None:
    """NCCL waits, in the rank that destroys its part first, for the others."""
    one, other = run_ranks(2, _lost_one_after_the_other)
    assert one == other
    assert one == [one[0], one[0] + 1, one[0]]


@on_ranks(1)
def test_a_model_may_be_collected_while_an_optimizer_steps(rank: int, device: torch.device) -> None:
    """torch goes through its hooks then, which may not change."""
    stepped = torch.nn.Parameter(torch.ones(3, device=device))
    stepped.grad = torch.ones(3, device=device)
    other = torch.optim.SGD([stepped], lr=0.5)
    collecting = register_optimizer_step_pre_hook(lambda *_: (gc.collect(), None)[1])
    try:
        gc.disable()
        net: Any = mlp(rank, device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
        alive = weakref.ref(net)
        del net, optimizer
        assert alive() is not None
        other.step()
    finally:
        gc.enable()
        collecting.remove()
    assert alive() is None
    assert stepped.tolist() == [0.5] * 3


@on_ranks(1)
def test_buckets_of_a_former_world_are_gone_without_the_collector(rank: int, device: torch.device) -> None:
    """They have as much memory as all gradients, which a GPU may not have twice."""
    net: Any = mlp(0, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.with_bagua([optimizer], Algorithm.init("gradient_allreduce"))
    train(net, optimizer, batches(rank, 2, device))
    former = [weakref.ref(bucket) for bucket in net.bagua_buckets]
    gc.disable()
    try:
        net.bagua_ddp._steps.follow_world()  # as after a lost rank
        assert [one() for one in former] == [None] * len(former)
    finally:
        gc.enable()
    train(net, optimizer, batches(rank, 2, device))
