"""`backward(create_graph=True)`: what is computed from `.grad` afterwards is right, or raises."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import (
    WRAPPERS,
    batches,
    check_equal,
    check_ranks_equal,
    engine_of,
    loss_of,
    message_of,
    mlp,
    momentum,
    train,
    wrap,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel.functional import all_reduce

REFUSED = "It cannot be differentiated"


def _allow_cycles() -> None:
    """Between parameter and gradient, about which torch warns: they are the caller's business."""
    warnings.filterwarnings("ignore", message="Using backward")


def _squares(gradients: Any) -> Tensor:
    return torch.stack([one.square().sum() for one in gradients]).sum()


def _gradients(net: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


def _check_refused(net: nn.Module) -> None:
    """However the graph is used; the name is that of a parameter."""
    first = next(net.parameters())
    message_of(RuntimeError, lambda: _squares(_gradients(net)).backward(retain_graph=True), REFUSED)
    slope = _gradients(net)[0].sum()
    message_of(RuntimeError, lambda: torch.autograd.grad(slope, first, allow_unused=True), "'0.weight'")


WAYS = {
    **{how: lambda net, optimizer, how=how: wrap(how, net, optimizer) for how in WRAPPERS},
    "unused": lambda net, _: DistributedDataParallel(net, find_unused_parameters=True),
    "bytegrad": lambda net, optimizer: net.with_bagua([optimizer], Algorithm.init("bytegrad")),
    "warm-up of async": lambda net, optimizer: net.with_bagua([optimizer], Algorithm.init("async", warmup_steps=99)),
    "warm-up of qadam": lambda net, optimizer: net.with_bagua([optimizer], QAdamAlgorithm(optimizer)),
}


def _nothing(*_: object) -> None:
    pass


def _check_no_leak(model: Any, net: nn.Module, batch: Any) -> None:
    class Sentinel:
        pass

    held = []
    for _ in range(2):
        sentinel = Sentinel()
        held.append(weakref.ref(sentinel))
        loss = loss_of(model, batch)
        loss.register_hook(functools.partial(_nothing, sentinel))
        loss.backward(create_graph=True)
        del loss, sentinel
        net.zero_grad()
    loss_of(model, batch).backward()
    net.zero_grad()
    gc.collect()
    assert [one() for one in held] == [None, None]


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_the_graph_of_what_was_communicated_is_refused(rank: int, device: torch.device, way: str) -> None:
    _allow_cycles()
    net = mlp(5, device)
    twin = copy.deepcopy(net)
    make = QAdamOptimizer if "qadam" in way else torch.optim.SGD
    optimizers = [make(one.parameters(), lr=0.01) for one in (net, twin)]
    models = [WAYS[way](one, optimizer) for one, optimizer in zip((net, twin), optimizers, strict=True)]
    data = batches(rank, 6, device)
    for number, batch in enumerate(data):
        for model, optimizer, net_of_it in zip(models, optimizers, (net, twin), strict=True):
            optimizer.zero_grad(set_to_none=number % 3 > 0)
            # On one rank alone, too; and after passes that have left a graph.
            makes_graph = net_of_it is net and (number % 2 == 0 or rank == 1)
            loss_of(model, batch).backward(create_graph=makes_graph)
            if number == 2:
                loss_of(model, data[0]).backward()
            if makes_graph and number != 2:
                _check_refused(net)
            optimizer.step()
    check_equal(net, twin)
    check_ranks_equal(net)
    _check_no_leak(models[0], net, data[0])


def _check_mean(net: nn.Module, local: nn.Module) -> None:
    for mine, other in zip(_gradients(net), _gradients(local), strict=True):
        expected = other.detach().clone()
        dist.all_reduce(expected)
        torch.testing.assert_close(mine.detach(), expected / dist.get_world_size())


@pytest.mark.parametrize("how", WRAPPERS)
@on_ranks(2)
def test_a_graph_that_is_not_communicated_yet(rank: int, device: torch.device, how: str) -> None:
    """In no_sync the graph is that of this rank's gradient, until that is communicated."""
    _allow_cycles()
    net = mlp(5, device)
    twin = copy.deepcopy(net)
    optimizer = momentum(net)
    model = wrap(how, net, optimizer)
    first, second, third = batches(rank, 3, device)
    with engine_of(model).no_sync():
        loss_of(model, first).backward(create_graph=True)
    (loss_of(model, second) + _squares(_gradients(net))).backward()
    loss_of(twin, first).backward(create_graph=True)
    (loss_of(twin, second) + _squares(_gradients(twin))).backward()
    _check_mean(net, twin)
    _check_refused(net)
    # Gradients of inputs are never communicated. Those of parameters are a sum of two passes.
    x, y = third[0].requires_grad_(), third[1]
    for one in (model, twin):
        one.zero_grad()
        x.grad = None
        loss_of(one, (x, y)).backward(create_graph=True)
        slope = x.grad
        assert slope is not None
        slope.square().mean().backward()
    _check_mean(net, twin)


@pytest.mark.parametrize("name", ["decentralized", "low_precision_decentralized"])
@on_ranks(2)
def test_graphs_of_gradients_that_stay_here(rank: int, device: torch.device, name: str) -> None:
    """Algorithms that communicate no gradients leave their graphs alone."""
    _allow_cycles()
    net: Any = mlp(5, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net.with_bagua([optimizer], Algorithm.init(name))
    for batch in batches(rank, 4, device):
        twin = copy.deepcopy(net)
        for one in (net, twin):
            one.zero_grad()
            loss_of(one, batch).backward(create_graph=True)
            _squares(_gradients(one)).backward()
        for mine, other in zip(_gradients(net), _gradients(twin), strict=True):
            torch.testing.assert_close(mine, other)
        optimizer.step()


@on_ranks(2)
def test_a_penalty_on_the_mean_gradient(rank: int, device: torch.device) -> None:
    """As the message says: a penalty on the mean gradient of all ranks is that of one process with all batches."""
    _allow_cycles()
    net = mlp(5, device)
    alone = copy.deepcopy(net)
    model = wrap("with_bagua", net, momentum(net))
    parts = [batches(one, 1, device)[0] for one in range(2)]
    parameters = list(net.parameters())
    loss = loss_of(model, parts[rank])
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    (loss + _squares(all_reduce(one, bagua.ReduceOp.AVG) for one in gradients)).backward()
    whole = (loss_of(alone, parts[0]) + loss_of(alone, parts[1])) / 2
    (whole + _squares(torch.autograd.grad(whole, list(alone.parameters()), create_graph=True))).backward()
    for mine, other in zip(_gradients(net), _gradients(alone), strict=True):
        torch.testing.assert_close(mine, other)


@on_ranks(2)
def test_passes_without_zeroing(rank: int, device: torch.device) -> None:
    """Without zeroing, as torch's own test of this call."""
    _allow_cycles()
    net = mlp(5, device)
    model = DistributedDataParallel(net)
    batch = batches(rank, 1, device)[0]
    for _ in range(3):
        loss_of(model, batch).backward(create_graph=True)
    summed = [one.detach().clone() for one in _gradients(net)]
    net.zero_grad()
    loss_of(model, batch).backward()
    for three, one in zip(summed, _gradients(net), strict=True):
        torch.testing.assert_close(three, 3 * one)
    train(model, momentum(net), batches(rank, 2, device))
    check_ranks_equal(net)
