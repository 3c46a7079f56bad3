"""Which parameters of a module take part: tied, ignored, expert, frozen, replaced and sparse ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    Branches,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    loss_of,
    message_of,
    mlp,
    torch_ddp,
    train,
    with_algorithm,
)
from torch import Tensor, nn
from torch.nn.utils import prune


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Tied(nn.Module):
    """One matrix in two places, and a parameter at the root that is part of another module, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.second = nn.Linear(2, 4)
        self.second.weight = self.first.weight
        self.shift = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(torch.relu(x)) + self.shift


class Root(nn.Module):
    """All parameters at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("make", "names"),
    [(Tied, ["shift", "first.weight", "second.bias"]), (Root, ["weight", "bias"])],
    ids=["tied", "root"],
)
@on_ranks(2)
def test_each_parameter_once_under_its_first_name(
    rank: int, device: torch.device, make: Callable[[], nn.Module], names: list[str]
) -> None:
    torch.manual_seed(rank)
    ours: Any = make().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = _sgd(ours), _sgd(theirs)
    with_algorithm(ours, optimizer)
    train(ours, optimizer, batches(rank, 5, device))
    train(torch_ddp(theirs), other, batches(rank, 5, device))
    check_equal(ours, theirs)
    assert [name for name, _ in ours.bagua_build_params()] == names


@pytest.mark.parametrize("how", ["bagua", "ddp", "expert"])
@on_ranks(2)
def test_ignored_and_expert_parameters_stay_with_their_rank(rank: int, device: torch.device, how: str) -> None:
    torch.manual_seed(rank)
    net: Any = Branches().to(device)
    net.loose = nn.Parameter(torch.full((1,), float(rank), device=device))
    if how == "expert":
        net.loose.expert = True
        for parameter in net.never.parameters():
            parameter.expert = True
    else:
        names = {"ddp": ["loose", "never.weight", "never.bias"], "bagua": [".loose", "never.weight", ".never.bias"]}
        setattr(net, f"_{how}_params_and_buffers_to_ignore", names[how])
    own = copy.deepcopy(net.never)
    optimizer = _sgd(net)
    with_algorithm(net, optimizer)
    assert "loose" not in [name for name, _ in net.bagua_build_params()]
    for batch in batches(rank, 4, device):
        optimizer.zero_grad()
        # Gradients of ignored ones differ by rank and stay so.
        (loss_of(net, batch, take=("left", "right")) + (rank + 1) * net.loose.sum()).backward()
        assert net.loose.grad.item() == rank + 1
        optimizer.step()
    check_equal(net.never, own)
    expected = rank - 4 * 0.1 * (rank + 1)
    assert abs(net.loose.item() - expected) < 1e-5
    check_tensor_on_ranks(net.trunk.weight, "trunk")


@pytest.mark.parametrize("how", ["bagua", "expert"])
@on_ranks(2)
def test_optimizer_state_of_what_is_left_out_stays_with_its_rank(rank: int, device: torch.device, how: str) -> None:
    torch.manual_seed(rank)
    net: Any = Branches().to(device)
    # A part of something larger, cut unevenly, and a branch that only one rank takes.
    net.part = nn.Parameter(torch.full((rank + 1,), float(rank), device=device))
    if how == "expert":
        for parameter in (net.part, *net.never.parameters()):
            parameter.expert = True
    else:
        net._bagua_params_and_buffers_to_ignore = ["part", "never.weight", "never.bias"]
    alone = nn.Parameter(net.part.detach().clone())
    optimizer, other = torch.optim.Adam(net.parameters(), lr=0.1), torch.optim.Adam([alone], lr=0.1)
    take = ("left", "right", "never") if rank else ("left", "right")
    steps = 0
    # Everything begins anew as parameters are frozen, and as the module is wrapped again.
    for change in ("wrap", "freeze", "unfreeze", "wrap"):
        if change == "wrap":
            with_algorithm(net, optimizer)
        else:
            net.left.requires_grad_(change == "unfreeze")
        for batch in batches(rank, 3, device, seed=steps):
            optimizer.zero_grad()
            ((rank + 1) * net.part.sin().sum() + loss_of(net, batch, take=take)).backward()
            optimizer.step()
            other.zero_grad()
            ((rank + 1) * alone.sin().sum()).backward()
            other.step()
            steps += 1
        assert torch.equal(net.part, alone), change
        assert [optimizer.state[one]["step"] for one in net.never.parameters() if one in optimizer.state] == (
            [steps, steps] if rank else []
        )
        check_tensor_on_ranks(net.trunk.weight, change)
        check_tensor_on_ranks(optimizer.state[net.trunk.weight]["exp_avg"], change)


def _renamed() -> list[str]:
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    # The same parameter under another name, as after a parametrization.
    prune.random_unstructured(net[0], "weight", amount=0.0)
    train(net, optimizer, batches(rank, 2, device))
    net[2].requires_grad_(False)
    train(net, optimizer, batches(rank, 2, device))
    check_ranks_equal(nn.ParameterList(net.parameters()))
    return [name for name, _ in net.bagua_build_params()]


def test_parameters_that_are_renamed_on_the_way() -> None:
    names = ["0.bias", "0.weight_orig", "4.weight", "4.bias"]
    assert run_ranks(2, _renamed) == [names, names]


@on_ranks(2)
def test_parameters_frozen_and_unfrozen_on_the_way(rank: int, device: torch.device) -> None:
    net, twin = mlp(rank, device), mlp(rank, device)
    optimizer, other = (torch.optim.Adam(one.parameters(), lr=0.01) for one in (net, twin))
    frozen = [0]
    for one in (net, twin):
        one[0].requires_grad_(False)
    dist.broadcast(twin[0].weight.data, 0)
    dist.broadcast(twin[0].bias.data, 0)
    dist.broadcast(net[0].weight.data, 0)
    dist.broadcast(net[0].bias.data, 0)
    with_algorithm(net, optimizer)
    for number, layers in enumerate(([0], [], [2, 4], [4], [0, 2])):
        for layer in frozen:
            net[layer].requires_grad_(True)
            twin[layer].requires_grad_(True)
        frozen = layers
        for layer in frozen:
            net[layer].requires_grad_(False)
            twin[layer].requires_grad_(False)
        data = batches(rank, 3, device, seed=number)
        train(net, optimizer, data)
        train(torch_ddp(twin), other, data)
        check_equal(net, twin, f"with {layers} frozen")
        names = {name.split(".")[0] for name, _ in net.bagua_build_params()}
        assert names == {"0", "2", "4"} - {str(layer) for layer in layers}
    assert net.bagua_train_step_counter == 15
    # What is frozen is not ours any more.
    taken: Any = nn.ModuleDict({"first": net[0].requires_grad_(True)})
    with_algorithm(taken, _sgd(taken))


@on_ranks(2)
def test_a_layer_that_was_replaced_is_noticed(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = _sgd(net)
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    old = net[4]
    torch.manual_seed(rank)
    net[4] = nn.Linear(50, 4).to(device)
    optimizer = _sgd(net)
    net(batches(rank, 1, device)[0][0]).square().sum().backward()
    message = message_of(RuntimeError, lambda: net(batches(rank, 1, device)[0][0]))
    with_algorithm(net, optimizer)
    train(net, optimizer, batches(rank, 2, device))
    check_ranks_equal(net)
    # The old layer is free to be part of something else.
    other: Any = nn.ModuleDict({"head": old})
    with_algorithm(other, _sgd(other))
    assert "4.weight" in message
    assert "other parameters now" in message
    assert "wrap it again" in message


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_conversions_and_lazy_layers_are_named(rank: int, device: torch.device, set_to_none: bool) -> None:
    """What changes the parameters under our hands is said, not mixed up."""
    net = mlp(rank, device)
    with_algorithm(net, _sgd(net))
    loss_of(net, batches(rank, 1, device)[0]).backward()
    net.double()
    net.zero_grad(set_to_none)
    x = batches(rank, 1, device)[0][0].double()
    messages = [message_of(RuntimeError, lambda: net(x).sum().backward())]
    with_algorithm(net, _sgd(net))
    net(x).sum().backward()
    check_tensor_on_ranks(net[0].weight.grad, "gradient")
    lazy: Any = nn.Sequential(nn.LazyLinear(4)).to(device)
    messages.append(message_of(ValueError, lambda: with_algorithm(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1))))
    assert "'4.bias'" in messages[0]
    assert "wrap it again" in messages[0]
    assert "0.weight" in messages[1]
    assert "one forward pass" in messages[1]


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self.table, sparse=True).sum()


@on_ranks(2)
def test_sparse_gradients_are_refused_by_name(rank: int, device: torch.device) -> None:
    sparse: Any = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)).to(device)
    refused = message_of(NotImplementedError, lambda: with_algorithm(sparse, _sgd(sparse)))
    sparse._bagua_params_and_buffers_to_ignore = ["0.weight"]
    with_algorithm(sparse, _sgd(sparse))
    sparse(torch.tensor([rank], device=device)).sum().backward()
    assert sparse[0].weight.grad.is_sparse
    # One that nobody can know beforehand:
    hidden: Any = Hidden().to(device)
    with_algorithm(hidden, _sgd(hidden))
    assert "0.weight" in refused
    assert "sparse=False" in refused
    message_of(NotImplementedError, lambda: hidden(torch.tensor([rank], device=device)).backward(), "'table'")
