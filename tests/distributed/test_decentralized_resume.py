"""Decentralized training that is saved and resumed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from support.decentralized import Case, check_resumed
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


def _resumed(cases: Sequence[Case]) -> None:
    rank, device = begin()
    for case in cases:
        net, other = check_resumed(case, rank, device)
        for ours, theirs in zip(other.bagua_buckets, net.bagua_buckets, strict=True):
            assert torch.equal(ours._peer_weight, theirs._peer_weight)
            assert ours.operation.exchanges == theirs.operation.exchanges == -(-10 // case.interval)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    cases = [
        Case(mode, interval, make_optimizers=momentum, dtype=dtype)
        for mode, interval, dtype in (
            ("all", 2, torch.float32),
            ("shift_one", 1, torch.bfloat16),
            ("shift_one", 3, torch.float32),
        )
    ]
    run_ranks(4, _resumed, cases)
    run_ranks(4, _resumed, [Case("shift_one", 2, hierarchical=True)], env=TWO_NODES_OF_TWO)


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
    message_of(ValueError, lambda: engine.load_state_dict({**good, "algorithm": {}}), "peer_weights")
    larger = {**good["algorithm"], "peer_weights": [torch.zeros(3)]}
    message_of(ValueError, lambda: engine.load_state_dict({**good, "algorithm": larger}), "another model")
    plain: Any = mlp(0, device)
    plain.with_bagua([torch.optim.SGD(plain.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    message_of(ValueError, lambda: plain.bagua_ddp.load_state_dict(good), "with the same algorithm")
