"""Buckets that change in training: values stay, nothing is broadcast, and all ranks agree first."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import DEVICE_VARIABLE, run_ranks
from support.training import (
    algorithm_of,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    message_of,
    mlp,
    momentum,
    torch_ddp,
    train,
)
from torch import Tensor, nn

from bagua.collectives import byte_transport
from bagua.job import long_waits
from bagua.job.failure_report import CollectiveError
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def _accumulate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()


@on_ranks(2)
def test_what_was_replaced_does_not_come_back(rank: int, device: torch.device) -> None:
    model: Any = mlp(rank, device)
    optimizer = momentum(model)
    model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    former = [list(model.bagua_buckets)]
    for change in (model.bagua_ddp.rebuild_buckets, model.bagua_ddp.replan, model.bagua_ddp.replan):
        change()
        assert not any(one is other for one in model.bagua_buckets for buckets in former for other in buckets)
        former.append(list(model.bagua_buckets))
    model.bagua_ddp.replan(dataclasses.replace(model.bagua_ddp.setup, bucket_bytes=400, first_bucket_bytes=400))
    assert len(model.bagua_buckets) > len(former[0])
    train(model, optimizer, batches(rank, 2, device))
    check_ranks_equal(model)


@on_ranks(2)
def test_halves_that_are_frozen_in_turn(rank: int, device: torch.device) -> None:
    """As torch's wrapper with both halves trained, and None for the gradients of the frozen one."""
    ours = mlp(rank, device)
    theirs = copy.deepcopy(ours)
    halves = [(net[:2], net[2:]) for net in (ours, theirs)]
    optimizers = [[torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in pair] for pair in halves]
    ours.with_bagua(optimizers[0], GradientAllReduceAlgorithm())
    reference = torch_ddp(theirs, find_unused_parameters=True)
    broadcasts: list[Any] = []
    plans: list[Any] = []
    original = byte_transport.broadcast
    byte_transport.broadcast = lambda *arguments: (broadcasts.append(arguments), original(*arguments))
    try:
        for number, batch in enumerate(batches(rank, 12, device)):
            for (model, (first, second)), pair in zip(
                ((ours, halves[0]), (reference, halves[1])), optimizers, strict=True
            ):
                for index, half in enumerate((first, second)):
                    half.requires_grad_(index == number % 2)
                pair[number % 2].zero_grad()
                _accumulate(model, batch)
                pair[number % 2].step()
            plans.append(ours.bagua_buckets[0])
            check_equal(ours, theirs, f"step {number}")
    finally:
        byte_transport.broadcast = original
    assert broadcasts == [], "all had the same values from the beginning"
    assert plans == plans[:2] * 6, "two plans, which are kept"
    # Others on each rank, of which one knows its plan from before: noticed before anything is communicated.
    ours[:2].requires_grad_(True)
    ours[2:].requires_grad_(rank == 1)
    messages = [message_of(RuntimeError, lambda: _accumulate(ours, batches(rank, 1, device)[0])) for _ in range(2)]
    assert "different parameters" in messages[0]
    assert messages[0] in messages[1], "training is refused, with the cause"
    ours.requires_grad_(True)
    ours.with_bagua(optimizers[0], GradientAllReduceAlgorithm())
    check_ranks_equal(ours)
    # Frozen and unfrozen by one rank alone: an error that names it, and no wait.
    ours.requires_grad_(True)
    ours(batches(rank, 1, device)[0][0])
    before = [one.clone() for one in ours.parameters()]
    if rank == 1:
        ours[0].requires_grad_(False)
    message_of(RuntimeError, ours.bagua_ddp.replan, "rank 1 has '2.weight'")
    assert all(torch.equal(one, value) for one, value in zip(ours.parameters(), before, strict=True))
    # Nothing was changed by that: training goes on when the ranks agree again.
    ours.requires_grad_(True)
    train(ours, optimizers[0][0], batches(rank, 2, device))
    check_ranks_equal(ours)
    # So it is with a plan that one of them knows from before.
    ours[:2].requires_grad_(False)
    ours.bagua_ddp.replan()
    ours.requires_grad_(True)
    ours.bagua_ddp.replan()
    buckets = list(ours.bagua_buckets)
    ours[:2].requires_grad_(False)
    ours[2].requires_grad_(rank == 0)
    assert "different parameters" in message_of(RuntimeError, ours.bagua_ddp.replan)
    assert all(one is other for one, other in zip(ours.bagua_buckets, buckets, strict=True))
    # A forward pass begins to compare such a plan; what comes next is compared after it.
    ours.requires_grad_(True)
    ours.bagua_ddp.replan()
    ours[:2].requires_grad_(False)
    ours(batches(rank, 1, device)[0][0])
    ours.requires_grad_(True)
    ours.bagua_ddp.replan()
    train(ours, optimizers[0][0], batches(rank, 2, device))
    check_ranks_equal(ours)


def _frozen_by_one_rank() -> str:
    long_waits.ASK_S, long_waits.REPEAT_S, long_waits.ANSWER_S = 0.6, 0.8, 0.6
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    data = batches(rank, 2, device)
    train(net, optimizer, data)
    if rank == 0:
        net[0].requires_grad_(False)
    return message_of(CollectiveError, lambda: train(net, optimizer, data))


@pytest.mark.skipif(os.environ.get(DEVICE_VARIABLE) == "cuda", reason="NCCL cannot tell collectives apart")
def test_one_rank_alone_freezes_a_layer() -> None:
    """It asks the others what they train; they sum gradients. All of them end, and say what each one did."""
    first, *others = run_ranks(3, _frozen_by_one_rank)
    alone = "agreeing on the parameters to communicate, which the other ranks do not take part in"
    gradients = "waiting for the gradients of a backward pass"
    assert f"Operation on rank 0: {alone}" in first
    assert all(f"Operation on rank {rank}: {gradients}." in first for rank in (1, 2))
    assert all(f"Operation on rank 0: {alone}." in message for message in others)
    assert "Check that all ranks run the same operations" in first


@on_ranks(2)
def test_a_layer_that_was_frozen_when_the_module_was_wrapped(rank: int, device: torch.device) -> None:
    """What was never synchronized is broadcast when it is unfrozen, once."""
    net: Any = mlp(0, device)
    net[0].requires_grad_(False)
    with torch.no_grad():
        net[0].weight.fill_(rank)
    optimizer = momentum(net)
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    data = batches(rank, 3, device)
    train(net, optimizer, data)
    assert net[0].weight.eq(rank).all()
    net[0].requires_grad_(True)
    train(net, optimizer, data)
    check_ranks_equal(net)


# --- what algorithms declare -----------------------------------------------------------------------------------------


class Nothing(Algorithm):
    """Communicates nothing: `init_tensors` gives no tensors."""

    def __init__(self, depth: int = 1, note: object = None) -> None:
        self.depth, self.note = depth, note

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return NothingImpl(process_group)


class NothingImpl(AlgorithmImpl):
    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        return []


def _declared() -> tuple[list[str], float]:
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], Nothing(note=object()))
    train(net, optimizer, batches(rank, 3, device))
    messages = [
        message_of(RuntimeError, lambda algorithm=algorithm: net.with_bagua([optimizer], algorithm))
        for algorithm in (
            Nothing(depth=rank),
            AsyncModelAverageAlgorithm(warmup_steps=5 * (rank + 1)),
            GradientAllReduceAlgorithm(average=rank == 0),
        )
    ]
    train(net, optimizer, batches(rank, 1, device))  # as before
    return messages, next(net.parameters()).sum().item()


def test_an_algorithm_without_tensors_and_settings_that_differ_by_rank() -> None:
    (messages, own), (others, its) = run_ranks(2, _declared, reuse=True)
    assert own != its, "nothing was communicated"
    assert messages == others
    for message, words in zip(
        messages,
        (("depth=0", "depth=1"), ("warmup_steps=5", "warmup_steps=10"), ("average=True", "average=False")),
        strict=True,
    ):
        assert "different settings" in message
        for word in words:
            assert word in message


class FadingImpl(AlgorithmImpl):
    phase: Any = "together"

    def init_tensors(self, bagua_ddp: Any) -> list[Tensor]:
        return super().init_tensors(bagua_ddp) if self.phase == "together" else []

    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.append_centralized_synchronous_op(group=self.process_group)


@on_ranks(2)
def test_a_phase_of_an_algorithm(rank: int, device: torch.device) -> None:
    """An algorithm that goes from gradients to nothing, between two forward passes."""
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], algorithm_of(FadingImpl))
    assert len(net.bagua_buckets) == 1
    train(net, optimizer, batches(rank, 2, device))
    check_ranks_equal(net)
    net.bagua_algorithm.phase = "alone"
    train(net, optimizer, batches(rank, 2, device))
    assert net.bagua_buckets == []
    sums = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(sums, net[0].weight.detach().sum().cpu())
    assert sums[0] != sums[1]
