"""Asynchronous model averaging under random schedules: whatever is called in whatever order, nothing hangs, and abort
gives all ranks the same bits; and after all of them the ranks still average.

A schedule is drawn from a seed. During warm-up, whose passes meet, all ranks do the same; after it each does what its
own generator says. What all ranks have to call, abort, resume and wrapping again, comes at the same places.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.async_runs import DEADLINE_S, threads, until
from support.rank_tests import on_ranks
from support.sweeps import rest_is_deep
from support.training import batches, check_ranks_equal, loss_of, mlp, with_algorithm

from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel


class _InterruptedError(Exception):
    """Of the user's own code."""


class _Trainer:
    """A model, and everything that a training loop may do with it."""

    def __init__(self, rank: int, device: torch.device, draw: random.Random) -> None:
        self.net = mlp(rank, device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=draw.choice((0.0, 0.9)))
        self.data = batches(rank, 3, device)
        self.model: Any = self.net
        self.wrap(draw)

    def wrap(self, draw: random.Random) -> None:
        interval_ms, warmup = draw.choice((-1, 0, 0, 1, 20, 500)), draw.choice((0, 0, 1, 3))
        algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=interval_ms, warmup_steps=warmup)
        if draw.random() < 0.3:
            listed = [self.optimizer] if draw.random() < 0.7 else []
            self.model = DistributedDataParallel(self.net, optimizers=listed, algorithm=algorithm)
        else:
            self.net.with_bagua([self.optimizer], algorithm)
            self.model = self.net

    @property
    def algorithm(self) -> Any:
        return self.model.bagua_algorithm

    def loss(self) -> torch.Tensor:
        return loss_of(self.model, self.data[0])

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def forward_only(self) -> None:
        self.loss()

    def forward_without_gradients(self) -> None:
        with torch.no_grad():
            self.loss()

    def two_forward_passes(self) -> None:
        (self.loss() + loss_of(self.model, self.data[1])).backward()
        self.optimizer.step()

    def accumulate(self) -> None:
        with self.net.bagua_ddp.no_sync():
            self.loss().backward()

    def step_of_what_was_accumulated(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()

    def interrupted_step(self) -> None:
        """A hook of the user's ends the forward pass."""

        def interrupt(*_: Any) -> None:
            raise _InterruptedError

        handle = self.net[2].register_forward_pre_hook(interrupt)
        with pytest.raises(_InterruptedError):
            self.loss()
        handle.remove()

    def local(self, draw: random.Random) -> None:
        calls: list[Callable[[], None]] = [
            *[self.step] * 6,
            *(self.forward_only, self.forward_without_gradients, self.two_forward_passes, self.accumulate),
            *(self.step_of_what_was_accumulated, self.evaluate, self.interrupted_step),
        ]
        draw.choice(calls)()

    def abort(self) -> None:
        was_stopped = self.algorithm.status == "stopped"
        self.algorithm.abort(self.model)
        # Alike on all ranks, though some may not have begun to average before.
        if self.algorithm.status == "stopped" and not was_stopped:
            check_ranks_equal(self.net, "after abort")


def _play(trainer: _Trainer, together: random.Random, alone: random.Random) -> None:
    for _ in range(together.randrange(1, 5)):
        for _ in range(together.randrange(8)):
            if trainer.algorithm.ranks_in_step:
                trainer.local(together)
        if not trainer.algorithm.ranks_in_step:
            for _ in range(alone.randrange(8)):
                trainer.local(alone)
        call = together.choice(("abort", "resume", "abort and resume", "nothing"))
        if call.startswith("abort"):
            trainer.abort()
        if call.endswith("resume"):
            trainer.algorithm.resume(trainer.model)
            assert trainer.algorithm.status in ("running", "warm-up")


def _train_until_averaged(trainer: _Trainer) -> None:
    """All ranks, of which the first to be done wait for the others in what they call together next."""
    trainer.algorithm.resume(trainer.model)
    staleness = trainer.algorithm.staleness
    before = staleness.count
    until(lambda: staleness.count > before, trainer.step)


@pytest.mark.parametrize(("ranks", "schedules"), rest_is_deep([(1, 50), (2, 50), (3, 25), (3, 50)], 2))
@on_ranks(timeout=2 * DEADLINE_S, fresh=True)
def test_no_schedule_hangs(rank: int, device: torch.device, schedules: int) -> None:
    gc.freeze()  # what is there now stays, and need not be looked at in every collection
    trainer: _Trainer | None = None
    for seed in range(schedules):
        together, alone = random.Random(seed), random.Random(f"{seed} {rank}")
        begins = together.choice(("new", "again", "other", "on", "on", "on"))
        if trainer is None or begins == "new":
            trainer = None  # dropped as it is, perhaps with its loop at work
            gc.collect()
            trainer = _Trainer(rank, device, together)
        elif begins == "again":
            trainer.wrap(together)
        elif begins == "other":
            with_algorithm(trainer.net, trainer.optimizer)
            trainer.model = trainer.net
            trainer.step()
            check_ranks_equal(trainer.net, "another algorithm")
            trainer.wrap(together)
        _play(trainer, together, alone)
    assert trainer is not None
    if dist.get_world_size() > 1:
        _train_until_averaged(trainer)
    trainer.abort()
    trainer = None
    gc.collect()
    until(lambda: threads() == 0)
