"""with_bagua as a function, its arguments, and algorithms by name wherever one is taken."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from support.logged import Lines
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    Branches,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    loss_of,
    message_of,
    torch_ddp,
)
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithmImpl, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel


def _net(rank: int, device: torch.device) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 4)).to(device)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _train(model: Any, optimizer: torch.optim.Optimizer, rank: int, device: torch.device) -> None:
    for batch in batches(rank, 4, device):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


@on_ranks(2)
def test_the_function_and_the_method_train_as_torch_ddp_does(rank: int, device: torch.device) -> None:
    first = _net(rank, device)
    second: Any = copy.deepcopy(first)
    third = copy.deepcopy(first)
    optimizers = [_sgd(one) for one in (first, second, third)]
    assert bagua.with_bagua(first, [optimizers[0]]) is first
    assert second.with_bagua([optimizers[1]]) is second
    for model, optimizer in zip((first, second, torch_ddp(third)), optimizers, strict=True):
        _train(model, optimizer, rank, device)
    check_ranks_equal(first)
    check_equal(first, second)
    check_equal(first, third)


@on_ranks(2)
def test_an_algorithm_by_name(rank: int, device: torch.device) -> None:
    named, made = _net(rank, device), _net(rank, device)
    optimizers = [_sgd(named), _sgd(made)]
    bagua.with_bagua(named, [optimizers[0]], "bytegrad")
    wrapped = DistributedDataParallel(made, optimizers=[optimizers[1]], algorithm="bytegrad")
    assert isinstance(wrapped.bagua_algorithm, ByteGradAlgorithmImpl)
    _train(named, optimizers[0], rank, device)
    _train(wrapped, optimizers[1], rank, device)
    check_equal(named, made)
    again = copy.deepcopy(wrapped)
    _train(again, _sgd(again), rank, device)
    assert isinstance(again.bagua_algorithm, ByteGradAlgorithmImpl)


@on_ranks(2)
def test_qadam_by_name_finds_its_optimizer(rank: int, device: torch.device) -> None:
    net: Any = _net(rank, device)
    head = nn.Linear(4, 1).to(device)
    optimizer, other = QAdamOptimizer(net.parameters(), warmup_steps=2), _sgd(head)
    for optimizers in ([_sgd(net)], [optimizer, QAdamOptimizer(head.parameters(), warmup_steps=2)]):
        for wrap in (
            lambda given=optimizers: net.with_bagua(given, "qadam"),
            lambda given=optimizers: DistributedDataParallel(net, optimizers=given, algorithm="qadam"),
        ):
            kinds = [type(one).__name__ for one in optimizers]
            assert f"needs one QAdamOptimizer; the optimizers are {kinds}" in message_of(ValueError, wrap)
    bagua.with_bagua(net, [optimizer, other], "qadam")
    assert isinstance(net.bagua_algorithm, QAdamAlgorithmImpl)
    assert net.bagua_algorithm.optimizer is optimizer
    _train(net, optimizer, rank, device)
    check_ranks_equal(net)


@on_ranks(1)
def test_an_unknown_name_is_refused_with_those_that_are_known(rank: int, device: torch.device) -> None:
    net: Any = _net(rank, device)
    optimizer = _sgd(net)
    known = "Did you mean 'bytegrad'? Known algorithms: async, bytegrad, decentralized, diloco, gradient_allreduce, "
    for wrap in (
        lambda: bagua.with_bagua(net, [optimizer], "bytgrad"),
        lambda: net.with_bagua([optimizer], "bytgrad"),
        lambda: net.with_bagua([optimizer], allow=["bytgrad"]),
        lambda: DistributedDataParallel(net, algorithm="bytgrad"),
    ):
        assert message_of(ValueError, wrap).startswith(f"Unknown algorithm 'bytgrad'. {known}")
    wrong: Any = ByteGradAlgorithm
    assert "Pass an instance: ByteGradAlgorithm()." in message_of(
        TypeError, lambda: DistributedDataParallel(net, algorithm=wrong)
    )
    bagua.with_bagua(net, [optimizer])  # nothing is left behind


class _Calling(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its type only, which calls another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class _Owning(torch.optim.SGD):
    """A whole optimizer that has another one for its own use."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)


@on_ranks(2)
def test_an_optimizer_that_only_calls_another_one(rank: int, device: torch.device) -> None:
    ours = _net(rank, device)
    theirs = copy.deepcopy(ours)
    optimizer, other = torch.optim.Adam(ours.parameters()), torch.optim.Adam(theirs.parameters())
    calling = _Calling(_Calling(optimizer))
    model: Any = bagua.with_bagua(ours, [calling])
    assert model.bagua_optimizers == [optimizer]
    _train(model, calling, rank, device)
    _train(torch_ddp(theirs), other, rank, device)
    check_equal(ours, theirs)
    wrapper = DistributedDataParallel(_net(rank, device), optimizers=[calling])
    assert wrapper.bagua_optimizers == [optimizer]
    owning = _Owning(theirs.parameters())
    wrapper = DistributedDataParallel(_net(rank, device), optimizers=[owning])
    assert wrapper.bagua_optimizers == [owning]


def _optimizers_of_models() -> list[list[str]]:
    rank, device = begin()
    other, heard = _net(rank, device), Lines(logging.WARNING)
    told = []
    for wrap in (
        lambda net, given: net.with_bagua(given),
        lambda net, given: DistributedDataParallel(net, optimizers=given),
    ):
        for given in (
            lambda _: [_sgd(other)],
            lambda net: [_sgd(net[0])],
            lambda net: [torch.optim.SGD([*other.parameters(), *net.parameters()], lr=0.1)],
            lambda net: [_sgd(other), _sgd(net)],
        ):
            net: Any = _net(rank, device)
            wrap(net, given(net))
            told.append(heard.lines.copy())
            heard.lines.clear()
    DistributedDataParallel(_net(rank, device))  # without optimizers
    return [*told, heard.lines]


def test_optimizers_of_another_model_alone_are_a_warning() -> None:
    """And not one of a part of the model, of more than it, or in a list with those of other models."""
    told, others = run_ranks(2, _optimizers_of_models)
    assert [len(lines) for lines in told] == [1, 0, 0, 0, 1, 0, 0, 0, 0]
    assert told[0] == told[4]
    assert "No optimizer that was given with Sequential steps any of its parameters (SGD)" in told[0][0]
    assert others == [[]] * 9


@on_ranks(2)
def test_unused_parameters_as_with_torch_ddp(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    ours: Any = Branches().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = _sgd(ours), _sgd(theirs)
    bagua.with_bagua(ours, [optimizer], find_unused_parameters=True)
    reference = torch_ddp(theirs, find_unused_parameters=True)
    takes = [("left",), ("right",), ("left", "right")]
    for number, batch in enumerate(batches(rank, 6, device)):
        take = takes[(number + rank) % len(takes)]
        for model, one in ((ours, optimizer), (reference, other)):
            one.zero_grad()
            loss_of(model, batch, take=take).backward()
            one.step()
    check_equal(ours, theirs)
    assert ours.never.weight.grad is None
    # Without it, the error says where to pass it.
    strict: Any = Branches().to(device)
    one = _sgd(strict)
    bagua.with_bagua(strict, [one])
    loss_of(strict, batches(rank, 1, device)[0], take=("left",)).backward()
    assert "pass find_unused_parameters=True to with_bagua() or to" in message_of(RuntimeError, one.step)
    # What any rank used in the last pass.
    assert not [name for name, _ in ours.bagua_build_params() if name.startswith("never")]
