"""A small model, its data, and local steps of all its replicas computed in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

RATE = 0.1


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()


def make_step(model: Any, optimizers: Sequence[torch.optim.Optimizer], number: int, replica: int) -> None:
    device = next(model.parameters()).device
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, batch(number, replica).to(device)).backward()
    for optimizer in optimizers:
        optimizer.step()


class Reference:
    """All ranks' replicas in one process.

    Args:
        fragments: names of parameters, in the order in which they are exchanged.
        outer: makes the outer optimizer; None: weights are averaged.
    """

    def __init__(
        self, ranks: int, fragments: list[list[str]], interval: int, delay: int, alpha: float, outer: Any
    ) -> None:
        self.replicas = [model_of(0) for _ in range(ranks)]  # rank 0's, as broadcast
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in self.replicas]
        self.fragments, self.interval, self.delay, self.alpha = fragments, interval, delay, alpha
        self.outer = {name: one.detach().clone().requires_grad_() for name, one in self.replicas[0].named_parameters()}
        self.outer_optimizers = [outer([self.outer[name] for name in names]) for names in fragments] if outer else None
        self.steps = self.rounds = 0
        self.contributed: dict[str, Tensor] = {}

    @torch.no_grad()
    def exchange(self, names: list[str]) -> None:
        replicas = [dict(one.named_parameters()) for one in self.replicas]
        self.contributed = {name: torch.stack([one[name] for one in replicas]).mean(0) for name in names}

    @torch.no_grad()
    def take(self, number: int, names: list[str]) -> None:
        if self.outer_optimizers is None:
            new = self.contributed
        else:
            for name in names:
                self.outer[name].grad = self.outer[name] - self.contributed[name]
            self.outer_optimizers[number].step()
            new = {name: self.outer[name] for name in names}
        for replica in self.replicas:
            for name, parameter in replica.named_parameters():
                if name in new:
                    parameter.copy_(new[name] + self.alpha * (parameter - new[name]))

    def step(self, number: int) -> None:
        for rank, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(replica, batch(number, rank)).backward()
            optimizer.step()
        self.steps += 1
        fragment = self.rounds % len(self.fragments)
        if self.steps == self.interval - self.delay:
            self.exchange(self.fragments[fragment])
        if self.steps == self.interval:
            self.take(fragment, self.fragments[fragment])
            self.steps, self.rounds = 0, self.rounds + 1
