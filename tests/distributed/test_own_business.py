"""What a rank does with a wrapped module by itself, and without a step: it is nobody else's business."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import (
    batches,
    check_equal,
    check_ranks_equal,
    loss_of,
    message_of,
    mlp,
    train,
    wrap_with,
)
from torch import Tensor, nn

from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@on_ranks(2)
def test_a_rank_may_differentiate_alone(rank: int, device: torch.device) -> None:
    """Gradients of inputs, on one rank; gradients of single samples, on all."""
    net = mlp(rank, device)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = _sgd(model)
    data = batches(rank, 4, device)
    train(model, optimizer, data[:2])
    x = data[0][0]
    if rank == 0:
        inputs = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model.module.eval()(inputs).sum(), inputs)
        assert gradient.shape == x.shape
        assert torch.autograd.grad(net(x).square().sum(), list(net.parameters()))[0].abs().sum() > 0
        net.train()
    weights = {name: one.detach() for name, one in net.named_parameters()}
    of_samples = torch.func.vmap(
        torch.func.grad(lambda given, one: torch.func.functional_call(net, given, (one[None],)).sum()), (None, 0)
    )(weights, x)
    assert of_samples["0.weight"].shape == (len(x), *net[0].weight.shape)
    train(model, optimizer, data[2:])
    check_ranks_equal(net)


def _sgd_as(name: str, net: nn.Module) -> torch.optim.Optimizer:
    return QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=2) if name == "qadam" else _sgd(net)


def _wrapped_as(name: str, net: Any, optimizer: Any) -> Any:
    if "wrapper" in name:
        return wrap_with(name, net, [optimizer], Algorithm.init("gradient_allreduce"))
    if name == "qadam":
        return net.with_bagua([optimizer], QAdamAlgorithm(optimizer))
    options = {"warmup_steps": 99} if name == "async" else {}
    return net.with_bagua([optimizer], Algorithm.init(name, **options))


# What a rank may do with a loss of the module, in training, before its backward pass.
OWN_BUSINESS: dict[str, Callable[[Any, Tensor, Tensor], object]] = {
    "one weight": lambda net, loss, _: torch.autograd.grad(loss, net[0].weight, retain_graph=True),
    "all weights": lambda net, loss, _: torch.autograd.grad(
        loss, list(net.parameters()), retain_graph=True, create_graph=True
    ),
    "inputs": lambda _, loss, x: torch.autograd.grad(loss, x, retain_graph=True),
    "accumulated in inputs": lambda _, loss, x: loss.backward(inputs=[x], retain_graph=True),
    "another forward pass": lambda net, _, x: torch.autograd.grad(net(x * 2).sum(), net[0].weight),
    "without a backward pass": lambda net, _, x: net(x * 2),
    "no_grad": lambda net, _, x: torch.no_grad()(net)(x),
    "inference": lambda net, _, x: torch.inference_mode()(net)(x.detach()),
    "jvp": lambda net, _, x: _jvp(net, x.detach()),
    "an error": lambda _, loss, __: message_of(RuntimeError, lambda: torch.autograd.grad(loss, torch.ones(1))),
}


def _jvp(net: Any, x: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own modules, which the first call imports
        torch.func.jvp(net, (x,), (x,))


@pytest.mark.parametrize(
    "name",
    [
        *("wrapper", "wrapper finding unused", "gradient_allreduce", "bytegrad", "qadam", "async"),
        *("decentralized", "low_precision_decentralized"),
    ],
)
@on_ranks(2)
def test_what_one_rank_does_before_its_backward_pass(rank: int, device: torch.device, name: str) -> None:
    nets = [mlp(5, device), mlp(5, device)]
    optimizers = [_sgd_as(name, net) for net in nets]
    models = [_wrapped_as(name, net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    data = batches(rank, len(OWN_BUSINESS), device)
    for (x, y), do in zip(data, OWN_BUSINESS.values(), strict=True):
        x.requires_grad_()
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = loss_of(model, (x, y))
            if rank == 0 and number == 0:
                do(nets[0], loss, x)
            loss.backward()
            optimizer.step()
        check_equal(*nets)
    if "decentralized" not in name:
        check_ranks_equal(nets[0])


class Skipping(nn.Module):
    """May leave out all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        return x * 2 if skip else self.layer(x)


@on_ranks(2)
def test_a_pass_that_reaches_no_parameter_counts_where_unused_ones_are_looked_for(
    rank: int, device: torch.device
) -> None:
    """A backward pass that reaches none of the module's parameters, on one rank: those of another one."""
    net, outer = Skipping().to(device), nn.Linear(2, 2).to(device)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    for x, _ in batches(rank, 3, device):
        net.zero_grad()
        model(outer(x), skip=rank == 1).sum().backward()
        bias = net.layer.bias.grad
        assert bias is not None
        assert torch.equal(bias, torch.full_like(bias, 2.0)), "the mean of four samples and none"
