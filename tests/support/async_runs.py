"""Training with asynchronous model averaging, for use inside a rank (support.ranks)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from support.training import Batch, MakeOptimizer, mlp, train, wrap_with
from torch import nn

from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

DEADLINE_S = 60.0
THREAD = "bagua-average"


def sgd(parameters: Iterable[nn.Parameter], lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def until(condition: Callable[[], bool], between: Callable[[], Any] = lambda: time.sleep(0.001)) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        between()


def threads() -> int:
    """That average."""
    return sum(thread.name == THREAD for thread in threading.enumerate())


class Run:
    """A wrapped model and its optimizer.

    Args:
        net: None: an mlp with weights of the rank, which wrapping makes those of rank 0.
        how: as of wrap_with.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        net: Any = None,
        *,
        how: str = "with_bagua",
        make: MakeOptimizer = sgd,
        interval_ms: float = 0,
        warmup: int = 0,
    ) -> None:
        self.net: Any = mlp(rank, device) if net is None else net
        self.optimizer = make(self.net.parameters())
        algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=interval_ms, warmup_steps=warmup)
        self.model = wrap_with(how, self.net, [self.optimizer], algorithm)
        self.algorithm = self.model.bagua_algorithm

    def train(self, data: Iterable[Batch]) -> None:
        train(self.model, self.optimizer, data)

    def train_until(self, condition: Callable[[], bool], data: Iterable[Batch]) -> None:
        until(condition, lambda: self.train(data))

    def train_until_averaged(self, data: Iterable[Batch], times: int = 1) -> None:
        """Until so many averages more were added."""
        wanted = self.algorithm.staleness.count + times
        self.train_until(lambda: self.algorithm.staleness.count >= wanted, data)

    def abort(self) -> None:
        self.algorithm.abort(self.model)

    def resume(self) -> None:
        self.algorithm.resume(self.model)
