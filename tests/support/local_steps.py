"""A small model, its data, and a step."""

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
