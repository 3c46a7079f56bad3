"""States of decentralized training: during an exchange, and of something else. That resumed runs go on is tested in
test_algorithms_resume.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from support.decentralized import Case
from support.rank_tests import on_ranks
from support.replicas import loss_of, train_step
from support.training import batches, check_equal, message_of, mlp

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


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
