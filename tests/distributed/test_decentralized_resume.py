"""Decentralized training that is saved and resumed."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.decentralized import Case
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.replicas import (
    loss_of,
    momentum,
    train_step,
)
from support.training import (
    TWO_NODES_OF_TWO,
    batches,
    begin,
    check_equal,
    message_of,
    mlp,
)

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def _resumed(rank: int, device: torch.device, case: Case) -> None:
    ranks = dist.get_world_size()
    _, net, optimizers, _ = case.build(rank, ranks, device)
    data = batches(rank, 10, device)
    saved = io.BytesIO()
    for step, batch in enumerate(data):
        if step == 5:
            state = {"model": net.state_dict(), "engine": net.bagua_ddp.state_dict()}
            torch.save({**state, "optimizers": [one.state_dict() for one in optimizers]}, saved)
        train_step(net, optimizers, batch)

    other: Any = mlp(77 + rank, device).to(case.dtype)
    other_optimizers = case.make_optimizers(other)
    case.wrap(other, other_optimizers)
    other(data[0][0].to(case.dtype))  # begins an exchange, which is none of the state's
    saved.seek(0)
    loaded = torch.load(saved, map_location=device)
    other.load_state_dict(loaded["model"])
    for optimizer, one in zip(other_optimizers, loaded["optimizers"], strict=True):
        optimizer.load_state_dict(one)
    other.bagua_ddp.load_state_dict(loaded["engine"])
    for batch in data[5:]:
        train_step(other, other_optimizers, batch)
    check_equal(other, net, f"resumed {case}")
    assert other.bagua_train_step_counter == net.bagua_train_step_counter == 10
    for ours, theirs in zip(other.bagua_buckets, net.bagua_buckets, strict=True):
        assert torch.equal(ours._peer_weight, theirs._peer_weight)
        assert ours.operation.exchanges == theirs.operation.exchanges == -(-10 // case.interval)


def _all_resumed(cases: Sequence[Case]) -> None:
    rank, device = begin()
    for case in cases:
        _resumed(rank, device, case)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    cases = [
        Case(mode, interval, make_optimizers=momentum, dtype=dtype)
        for mode, interval, dtype in (
            ("all", 2, torch.float32),
            ("shift_one", 1, torch.bfloat16),
            ("shift_one", 3, torch.float32),
        )
    ]
    run_ranks(4, _all_resumed, cases)
    run_ranks(4, _all_resumed, [Case("shift_one", 2, hierarchical=True)], env=TWO_NODES_OF_TWO)


@on_ranks(2)
def test_a_state_of_an_exchange_that_is_under_way(rank: int, device: torch.device) -> None:
    """A state that is saved between forward and backward has the mean, and the next round uses it."""
    case = Case("all")
    _, net, optimizers, _ = case.build(rank, 2, device)
    first, second = batches(rank, 2, device)
    train_step(net, optimizers, first)
    net.zero_grad()
    loss = loss_of(net, second)
    state = copy.deepcopy((net.state_dict(), net.bagua_ddp.state_dict()))
    loss.backward()
    optimizers[0].step()

    _, other, other_optimizers, _ = case.build(rank, 2, device)
    other.load_state_dict(state[0])
    other.bagua_ddp.load_state_dict(state[1])
    train_step(other, other_optimizers, second)
    check_equal(other, net)


@on_ranks(1)
def test_states_of_something_else_are_refused(rank: int, device: torch.device) -> None:
    case = Case("all")
    _, net, _, _ = case.build(rank, 1, device)
    engine = net.bagua_ddp
    good = engine.state_dict()
    told = message_of(ValueError, lambda: engine.load_state_dict({**good, "algorithm": {}}))
    assert "peer_weights" in told
    larger = {**good["algorithm"], "peer_weights": [torch.zeros(3)]}
    told = message_of(ValueError, lambda: engine.load_state_dict({**good, "algorithm": larger}))
    assert "another model" in told
    plain: Any = mlp(0, device)
    plain.with_bagua([torch.optim.SGD(plain.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    told = message_of(ValueError, lambda: plain.bagua_ddp.load_state_dict(good))
    assert "with the same algorithm" in told
