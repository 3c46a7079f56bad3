"""Models that train over one group at the same time: their operations keep one order."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.training import batches, begin, check_ranks_equal, loss_of
from torch import nn

from bagua.torch_api.algorithms import Algorithm

STEPS = 60
PAIRS = {
    "both on the thread": [("bytegrad", {"hierarchical": False})] * 2,
    "one that needs no thread": [("gradient_allreduce", {}), ("bytegrad", {"hierarchical": False})],
    "hierarchical": [("gradient_allreduce", {"hierarchical": True})] * 2,
}


def _threads() -> int:
    return sum(thread.name == "bagua-comm" for thread in threading.enumerate())


def _model(seed: int, algorithm: tuple[str, dict[str, Any]], device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    width = 1000 + 300 * seed
    net: Any = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 4)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    return net.with_bagua([optimizer], Algorithm.init(algorithm[0], **algorithm[1])), optimizer


def _train_together(algorithms: list[tuple[str, dict[str, Any]]], name: str, rank: int, device: torch.device) -> None:
    models = [_model(seed, algorithm, device) for seed, algorithm in enumerate(algorithms)]
    for step in range(STEPS):
        batch = batches(rank, 1, device, seed=step)[0]
        for _, optimizer in models:
            optimizer.zero_grad()
        torch.stack([loss_of(model, batch) for model, _ in models]).sum().backward()
        for _, optimizer in models:
            optimizer.step()
    for model, _ in models:
        check_ranks_equal(model, name)
    assert _threads() <= 1, name


def _two_models_in_one_loss(pairs: dict[str, list[tuple[str, dict[str, Any]]]]) -> None:
    rank, device = begin()
    for name, algorithms in pairs.items():
        _train_together(algorithms, name, rank, device)
        gc.collect()
        assert _threads() == 0, f"{name}: the thread has outlived its users"


@pytest.mark.parametrize("world", [2, 3])
def test_two_models_in_one_loss(world: int) -> None:
    run_ranks(world, _two_models_in_one_loss, PAIRS)
