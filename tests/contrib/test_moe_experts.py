"""The experts of one rank, computed together or one by one, and the slots of their tokens."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua.contrib.moe import exchange, experts
from bagua.contrib.moe.experts import Experts


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 6), nn.Linear(4, 6, bias=False), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x)), None


class Branching(nn.Linear):
    """What vmap cannot do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def made(expert: nn.Module, count: int = 3) -> Experts:
    torch.manual_seed(0)
    layer = Experts(expert, count)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def results(layer: Experts, tokens: Tensor, how: Any) -> list[Tensor]:
    layer.zero_grad()
    own = tokens.clone().requires_grad_()
    output = how(own)
    output.square().mean().backward()
    assert own.grad is not None
    return [output.detach(), own.grad, *(parameter.grad.clone() for parameter in layer.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "expert", [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), Gated()]
)
def test_together_or_one_by_one_is_the_same(expert: nn.Module) -> None:
    layer = made(expert)
    assert experts.are_alike(list(layer.bagua_experts))
    tokens = torch.randn(3, 5, 4)
    for one, other in zip(
        results(layer, tokens, layer),
        results(layer, tokens, lambda x: experts.stacked(list(layer.bagua_experts), x)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_what_cannot_be_computed_together_is_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked, calls = experts.stacked, []

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return stacked(*given)

    monkeypatch.setattr(experts, "stacked", counted)
    monkeypatch.setattr(experts, "pays", lambda *_: True)
    layer = made(Branching(4, 4))
    tokens = torch.randn(3, 5, 4)
    expected = torch.stack([one(x) for one, x in zip(layer.bagua_experts, tokens, strict=True)])
    for _ in range(2):
        torch.testing.assert_close(layer(tokens), expected)
    assert len(calls) == 1  # not tried again


def test_which_experts_are_alike() -> None:
    def changed(change: Any, expert: nn.Module | None = None) -> list[nn.Module]:
        layer = made(expert or nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)))
        change(layer.bagua_experts[1])
        return list(layer.bagua_experts)

    assert experts.are_alike(changed(lambda _: None))
    changes = [
        lambda one: one[1].eval(),
        lambda one: setattr(one[1], "p", 0.5),
        lambda one: one[0].weight.requires_grad_(False),
        lambda one: one[0].register_forward_hook(lambda *_: None),
        lambda one: one.append(nn.ReLU()),
    ]
    for number, change in enumerate(changes):
        assert not experts.are_alike(changed(change)), number
    assert not experts.are_alike(changed(lambda _: None, nn.Sequential(nn.BatchNorm1d(4))))


def test_copies_remain_experts() -> None:
    layer = made(nn.Linear(4, 4))
    for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(nn.Sequential(layer))):
        assert [parameter.expert for parameter in one.parameters()] == [True] * 6


def test_slots_and_their_gradients() -> None:
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    places = torch.tensor([3, 5, 0, 5])  # of five slots
    placed = exchange.put(rows, places, 5)
    assert torch.equal(placed[[3, 0]], rows[[0, 2]])
    assert placed[[1, 2, 4]].abs().sum() == 0
    assert torch.equal(exchange.take(placed, places), rows * torch.tensor([[1], [0], [1], [0]]))
    assert torch.autograd.gradcheck(lambda x: exchange.put(x, places, 5), rows)
    table = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: exchange.take(x, places), table)
    assert torch.autograd.gradgradcheck(lambda x: exchange.take(x, places).square(), table)
    # A slot's NaN is not everybody's.
    assert exchange.take(torch.full((5, 2), torch.nan), places)[[1, 3]].abs().sum() == 0
