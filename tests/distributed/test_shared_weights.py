"""Weights whose memory is shared, or which are given other memory, under the algorithms that exchange weights."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import Batch, batches, begin, check_close, check_tensor_on_ranks, message_of, train
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm

DEADLINE_S = 60.0

ALGORITHMS: dict[str, dict[str, Any]] = {
    "decentralized": {"hierarchical": False},
    "low_precision_decentralized": {"hierarchical": False},
    "async": {"sync_interval_ms": 0},
}


class Tied(nn.Module):
    """Two layers, and a buffer for what shares memory with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.register_buffer("seen", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def _by_data(net: Tied) -> None:
    net.second.weight.data = net.first.weight.data


def _transposed(net: Tied) -> None:
    net.second.weight = nn.Parameter(net.first.weight.data.t())


def _partly(net: Tied) -> None:
    memory = torch.randn(6, 4, device=net.first.weight.device) / 4
    net.first.weight.data, net.second.weight.data = memory[:4], memory[2:]


def _frozen(net: Tied) -> None:
    _by_data(net)
    net.second.requires_grad_(False)


def _nothing(net: Tied) -> None:
    """Only the buffer and a tensor of somebody else's share memory with the first layer."""


TIES = (_by_data, _transposed, _partly, _frozen, _nothing)


def _wrap(net: Any, optimizer: torch.optim.Optimizer, algorithm: str) -> Any:
    return net.with_bagua([optimizer], Algorithm.init(algorithm, **ALGORITHMS.get(algorithm, {})))


def _data(rank: int, device: torch.device, count: int) -> list[Batch]:
    return batches(rank, count, device, shape=(4, 4))


def _addresses(net: Tied) -> list[int]:
    return [tensor.data_ptr() for tensor in (*net.parameters(), net.seen)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@on_ranks(2)
def test_weights_keep_their_memory(rank: int, device: torch.device, algorithm: str) -> None:
    for tie in TIES:
        torch.manual_seed(0)
        net: Any = Tied().to(device)
        tie(net)
        net.seen = net.first.weight.data
        seen_by_others, addresses = net.first.weight.data[1], _addresses(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        _wrap(net, optimizer, algorithm)
        train(net, optimizer, _data(rank, device, 3))
        net.first.bias.requires_grad_(False)
        train(net, optimizer, _data(rank, device, 2))
        if algorithm == "async":
            net.bagua_algorithm.abort(net)
        net.bagua_ddp.detach()
        # Nothing was moved, so that whoever shares memory with the weights still does, by whatever way.
        assert _addresses(net) == addresses, tie.__name__
        assert torch.equal(seen_by_others, net.first.weight[1])


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized"])
@on_ranks(2)
def test_two_parameters_in_one_memory_are_exchanged_as_one(rank: int, device: torch.device, algorithm: str) -> None:
    """One parameter that two layers have is stepped with the sum of the gradients; so are two in the same memory."""
    nets: list[Any] = []
    for is_one in (True, False):
        torch.manual_seed(0)
        net: Any = Tied().to(device)
        if is_one:
            net.second.weight = net.first.weight
        else:
            _by_data(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        _wrap(net, optimizer, algorithm)
        train(net, optimizer, _data(rank, device, 5))
        nets.append(net)
    # Two in the same bucket have the same differences, in the same range.
    check_close(nets[1], nets[0], algorithm)


# --- other memory ----------------------------------------------------------------------------------------------------


def _double(net: nn.Module) -> torch.dtype:
    net.double()
    return torch.float64


def _short(net: nn.Module) -> torch.dtype:
    for parameter in net.parameters():
        parameter.data = parameter.data.bfloat16()
    return torch.bfloat16


def _smaller(net: Any) -> torch.dtype:
    net.first.bias.data = net.first.bias.data[:1]
    return torch.float32


def _swapped(net: nn.Module) -> torch.dtype:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return _double(net)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _parametrized(net: Any) -> torch.dtype:
    nn.utils.parametrizations.weight_norm(net.first)
    return torch.float32


def _train_on(net: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Until it is refused. Of async, the first copy may come some steps later."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        train(net, optimizer, [batch])


def _converted(algorithm: str, convert: Callable[[Any], torch.dtype]) -> str:
    rank, device = begin()
    torch.manual_seed(0)
    net: Any = Tied().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    _wrap(net, optimizer, algorithm)
    data = _data(rank, device, 3)
    train(net, optimizer, data)
    dtype = convert(net)
    data = [(inputs.to(dtype), targets) for inputs, targets in data]
    message = message_of(RuntimeError, lambda: _train_on(net, optimizer, data[0]))
    # The remedy.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _wrap(net, optimizer, algorithm)
    train(net, optimizer, data)
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    net.bagua_ddp.detach()
    return message


@pytest.mark.parametrize("convert", [_double, _short, _smaller])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_conversion_after_wrapping_is_refused(algorithm: str, convert: Any) -> None:
    for message in run_ranks(2, _converted, algorithm, convert, reuse=True):
        what, _, remedy = message.partition("\n")
        assert "The parameter '" in what
        assert "expects float32" in what
        assert "wrap it again" in remedy


ALL = ("gradient_allreduce", *ALGORITHMS)


@pytest.mark.parametrize("convert", [_swapped, _parametrized])
@pytest.mark.parametrize("algorithm", ALL)
def test_parameters_that_are_replaced_are_named(algorithm: str, convert: Any) -> None:
    for message in run_ranks(2, _converted, algorithm, convert, reuse=True):
        # Where gradients are communicated, that of a parameter that was removed is missing.
        assert "wrap it again" in message.lower() or "no gradient in the last backward pass: first.weight" in message


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized"])
@on_ranks(2)
def test_a_conversion_in_the_middle_of_a_round_is_refused(device: torch.device, algorithm: str) -> None:
    """Between a backward pass and the step, where an exchange is under way or owed: the remedy works there, too."""
    net: Any = Tied().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    _wrap(net, optimizer, algorithm)
    net(torch.randn(4, 4, device=device)).sum().backward()
    net.double()
    assert "wrap it again" in message_of(RuntimeError, optimizer.step)
    _wrap(net, optimizer, algorithm)
    net(torch.randn(4, 4, device=device, dtype=torch.float64)).sum().backward()
    optimizer.step()
    net(torch.randn(4, 4, device=device, dtype=torch.float64)).sum().backward()
    if algorithm == "decentralized":  # the mean that is under way is of weights that are no more
        net.float()
        _wrap(net, optimizer, algorithm)
    check_tensor_on_ranks(torch.tensor([net.bagua_ddp.bagua_train_step_counter]), "a step counter")


@torch.no_grad()
def _copied(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.copy_(parameter.data.clone())


def _loaded(net: nn.Module) -> None:
    net.load_state_dict(copy.deepcopy(net.state_dict()))


def _same_memory(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data


def _other_memory(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


def _other_strides(net: Any) -> None:
    net.second.weight.data = net.second.weight.data.t().contiguous().t()


def _converted_to_what_it_is(net: nn.Module) -> None:
    net.to(torch.float32, memory_format=torch.channels_last)


INNOCENT = (_copied, _loaded, _same_memory, _other_memory, _other_strides, _converted_to_what_it_is)


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized"])
@on_ranks(2)
def test_other_memory_with_the_same_values_changes_nothing(rank: int, device: torch.device, algorithm: str) -> None:
    changed, unchanged = nets = [Tied().to(device) for _ in range(2)]
    unchanged.load_state_dict(changed.state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        _wrap(net, optimizer, algorithm)
    for change in INNOCENT:
        change(changed)
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, _data(rank, device, 2))
        check_close(changed, unchanged, change.__name__)  # with other strides, products are added up otherwise
