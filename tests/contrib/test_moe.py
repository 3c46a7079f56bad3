"""Mixtures of experts: outputs and gradients are those of one process that has all experts; limits and errors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.moe_reference import mixture
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import each_value_once
from support.training import begin, check_tensor_on_ranks, message_of
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.contrib.moe.layer import MoE
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

HIDDEN = 6
AUX = 0.01


def expert_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 8), nn.ReLU(), nn.Linear(8, HIDDEN))


class Net(nn.Module):
    """A mixture between two layers, and a second mixture."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.mixture = MoE(HIDDEN, expert_net(), **options)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.last = MoE(HIDDEN, expert_net(), **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, first, _ = self.mixture(self.first(x))
        x, second, _ = self.last(self.second(x))
        return x, first + second


def made(rank: int, device: torch.device, **options: Any) -> Net:
    """The same gate and layers on each rank, and other experts."""
    torch.manual_seed(1)
    net = Net(**options).to(device)
    torch.manual_seed(10 + rank)
    for mixture_ in (net.mixture, net.last):
        for parameter in mixture_.bagua_moe.experts.parameters():
            nn.init.normal_(parameter, std=0.5)
    return net


def all_experts(layer: MoE) -> list[nn.Module]:
    """Of all ranks, in the order of their numbers."""
    gathered: list[Any] = [None] * dist.get_world_size()
    states = [expert.state_dict() for expert in layer.bagua_moe.experts.bagua_experts]  # type: ignore[union-attr]
    dist.all_gather_object(gathered, [{name: value.cpu() for name, value in one.items()} for one in states])
    experts = []
    for state in itertools.chain(*gathered):
        net = expert_net().to(next(layer.parameters()).device)
        net.load_state_dict(state)
        experts.append(net)
    return experts


def _equal(k: int, local: int, factor: float) -> int:
    rank, device = begin()
    size = dist.get_world_size()
    options = {"num_local_experts": local, "k": k, "eval_capacity_factor": factor, "min_capacity": 2}
    net = made(rank, device, **options)
    reference = copy.deepcopy(net)
    experts = [all_experts(layer) for layer in (net.mixture, net.last)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = net.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    model.eval()  # nothing is drawn, and gradients are communicated all the same
    torch.manual_seed(5)
    # Every rank knows all inputs; the ranks have different numbers of tokens.
    inputs = [torch.randn(3, 5 + other, HIDDEN).to(device) for other in range(size)]

    own = inputs[rank].clone().requires_grad_()
    output, l_aux = model(own)
    (output.square().mean() + AUX * l_aux).backward()

    dropped = 0
    losses = []
    for other in range(size):
        x = inputs[other].clone().requires_grad_()
        flat = x.view(-1, HIDDEN)
        total = torch.zeros((), device=device)
        for layer, dense, everybody in zip(
            (reference.mixture, reference.last), (reference.first, reference.second), experts, strict=True
        ):
            gate = layer.bagua_moe.gate.wg.weight  # type: ignore[union-attr]
            flat, auxiliary, _, lost = mixture(dense(flat), gate, everybody, k, factor, 2)
            total = total + auxiliary
            dropped += lost
        losses.append((flat.square().mean() + AUX * total) / size)
        if other == rank:
            mine, x_of_mine = flat, x
            torch.testing.assert_close(l_aux, total)
    sum(losses).backward()  # type: ignore[union-attr]

    torch.testing.assert_close(output.view(-1, HIDDEN), mine)
    torch.testing.assert_close(own.grad, x_of_mine.grad * size)
    checked = 0
    theirs = dict(reference.named_parameters())
    for name, parameter in net.named_parameters():
        if ".bagua_experts." not in name:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, msg=lambda text, name=name: f"{name}: {text}")
            check_tensor_on_ranks(parameter.grad, name)
            checked += 1
    assert checked == 6
    for layer, everybody in zip((net.mixture, net.last), experts, strict=True):
        for index, expert in enumerate(layer.bagua_moe.experts.bagua_experts):  # type: ignore[union-attr]
            for one, other_ in zip(expert.parameters(), everybody[rank * local + index].parameters(), strict=True):
                expected = torch.zeros_like(one) if other_.grad is None else other_.grad
                torch.testing.assert_close(one.grad, expected)
    return dropped


@pytest.mark.parametrize(("experts", "size"), each_value_once([(1, 1), (1, 8), (2, 1), (2, 2)], [2, 3]))
def test_outputs_and_gradients_are_those_of_one_process(experts: tuple[int, int], size: int) -> None:
    k, local = experts
    roomy, narrow = (run_ranks(size, _equal, k, local, factor, reuse=True)[0] for factor in (100, 0.6))
    assert roomy == 0
    assert narrow > 0


@pytest.mark.parametrize(
    ("k", "noise", "dtype", "local"),
    [
        (1, "Jitter", torch.float32, 2),
        (1, "RSample", torch.bfloat16, 1),
        (2, None, torch.bfloat16, 8),  # on GPUs, so many are computed together
    ],
)
@on_ranks(2)
def test_training(rank: int, device: torch.device, k: int, noise: str | None, dtype: torch.dtype, local: int) -> None:
    """With what is drawn in training, in a dtype of the user's choice."""
    net = made(rank, device, num_local_experts=local, k=k, noisy_gate_policy=noise, output_dropout_prob=0.1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    model = net.with_bagua([optimizer], GradientAllReduceAlgorithm())  # type: ignore[operator]
    torch.manual_seed(rank)
    x = torch.randn(32, HIDDEN, device=device)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            output, l_aux = model(x)
        loss = (output.float() - x.flip(1)).square().mean()
        (loss + AUX * l_aux).backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5]), losses
    for name, parameter in net.named_parameters():
        if not hasattr(parameter, "expert"):
            check_tensor_on_ranks(parameter, name)


@on_ranks(2)
def test_errors_of_one_rank_are_told_to_all(rank: int, device: torch.device) -> None:
    layer = MoE(HIDDEN, expert_net(), min_capacity=4).to(device)
    # One rank's mistake is an error of all.
    x = torch.randn(3 if rank == 1 else 8, HIDDEN, device=device)
    told = message_of(ValueError if rank == 1 else RuntimeError, lambda: layer(x))
    assert ("3 tokens, and min_capacity is 4" if rank == 1 else "Another rank could not") in told
    layer(torch.randn(8, HIDDEN, device=device))
    # A layer that was made for other ranks.
    other = copy.deepcopy(layer)
    other.bagua_moe.gate.wg = nn.Linear(HIDDEN, 5, bias=False).to(device)  # type: ignore[union-attr]
    assert "made for 5 experts, and the ranks have 2" in message_of(RuntimeError, lambda: other(x))


@on_ranks(2)
def test_experts_of_a_copy_are_not_synchronized(rank: int, device: torch.device) -> None:
    """A copy that is wrapped keeps its own experts."""
    net = copy.deepcopy(made(rank, device))
    before = [value.clone() for value in net.mixture.bagua_moe.experts.parameters()]
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], GradientAllReduceAlgorithm())  # type: ignore[operator]
    for one, parameter in zip(before, net.mixture.bagua_moe.experts.parameters(), strict=True):
        assert torch.equal(one, parameter)
    assert bagua.get_world_size() == 2
