"""One training on one rank: from a seed's start to the end of the schedule, and what became of it.

Nothing but the algorithm communicates while it trains. Copies of the parameters are kept on the way; they are averaged
over the ranks and evaluated when the last step is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm
from measure.convergence.catalogue import (
    ASYNC_WARMUP_SHARE,
    CASES,
    ERROR_FEEDBACK,
    FSDP,
    QADAM,
    QADAM_WARMUP_SHARE,
    SGD,
    TASKS,
    WARMUP_SHARE,
    learning_rate_of,
    optimizer_of,
)
from measure.convergence.evaluation import evaluate, evaluate_alone, mean_over_ranks
from measure.convergence.replicas import Averaged, average, snapshot
from measure.convergence.sharding import shard, steps_per_epoch
from measure.convergence.task import Task
from measure.convergence.traffic import SentBytes, counted
from measure.fsdp import shard_model

# Points of a curve, the start and the end among them.
CURVE_POINTS = 17


@dataclass(frozen=True)
class Trained:
    """Losses and accuracies are of the mean of all replicas (the common model where there is one)."""

    steps: int
    seconds: float  # of the training loop
    start_seconds: float  # of them, in the start; see Case.start_share
    parameters: int  # elements
    train_loss: float
    test_loss: float
    accuracy: float | None  # on the test split, 0..1
    replica_test_loss: float  # mean over the ranks of what each one's own model has
    spread: float  # see replicas.Averaged
    averages: int | None  # how often the parameters were averaged, where that happens during the steps
    staleness: float | None  # mean number of steps between copy and addition
    curve_steps: list[int]
    curve_loss: list[float]  # on the test split
    curve_bytes: list[float]  # that this rank has sent until then


def learning_rate_factor(step: int, steps: int) -> float:
    """Of step 0..steps-1: rises linearly over WARMUP_SHARE of them, and falls linearly to zero after that."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def curve_steps(steps: int, points: int = CURVE_POINTS) -> list[int]:
    """Numbers of steps after which a copy is kept: evenly spaced, 0 and `steps` among them, each once."""
    return sorted({round(steps * point / (points - 1)) for point in range(points)})


def make_optimizer(case: str, kind: str, model: nn.Module, learning_rate: float, steps: int) -> torch.optim.Optimizer:
    if kind == SGD:
        return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    if kind == QADAM:
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        warmup = max(1, round(QADAM_WARMUP_SHARE * steps))
        qadam: torch.optim.Optimizer = QAdamOptimizer(model.parameters(), learning_rate, warmup, **CASES[case].qadam)
        return qadam
    return torch.optim.Adam(model.parameters(), learning_rate)


def make_algorithm(case: str, optimizer: torch.optim.Optimizer, steps: int) -> Algorithm:
    """
    Raises:
        KeyError: this Bagua has no such algorithm.
    """
    chosen = CASES[case]
    options = dict(chosen.options)
    if chosen.algorithm == "qadam":
        options["q_adam_optimizer"] = optimizer
    if chosen.algorithm == "async":
        options["warmup_steps"] = round(ASYNC_WARMUP_SHARE * steps)
    if chosen.start_share:
        options["warmup_steps"] = round(chosen.start_share * steps)
    if chosen.momentum_share:
        rounds = (1 - chosen.start_share) * steps / int(options["sync_every"])  # type: ignore[call-overload]
        options["momentum_rounds"] = max(1, round(chosen.momentum_share * rounds))
    return Algorithm.init(chosen.algorithm, **options)


@dataclass(frozen=True)
class Kept:
    """At a point of the curve: the model, see replicas.snapshot, and the bytes that this rank has sent until then."""

    model: Tensor
    sent: float


def with_error_feedback(model: nn.Module, device: torch.device, case: str) -> nn.Module:
    from bagua.comm_hooks import ErrorFeedbackState, error_feedback_bytegrad

    wrapped = nn.parallel.DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    wrapped.register_comm_hook(ErrorFeedbackState(**CASES[case].options), error_feedback_bytegrad)
    return wrapped


class Training:
    """Use once: `run`.

    Args:
        task: on the host.
        steps: None: those of TaskSettings; otherwise that many, with the schedule made for them.
    """

    def __init__(self, task: Task, case: str, seed: int, device: torch.device, steps: int | None = None) -> None:
        settings = TASKS[task.name]
        self._task = task
        self._case = case
        self._seed = seed
        self._device = device
        self._batch_size = settings.batch_size
        self._per_epoch = steps_per_epoch(len(task.train), settings.batch_size)
        self._steps = steps or settings.steps or (settings.epochs or 1) * self._per_epoch
        # Steps of its warm-up.
        self._start = round(CASES[case].start_share * self._steps)
        self._learning_rate = learning_rate_of(task.name, case, dist.get_world_size())
        self._start_seconds = 0.0
        self._averages: int | None = None
        self._staleness: float | None = None
        torch.manual_seed(seed)
        self._model: Any = task.build_model().to(device)
        self._wrapped: nn.Module = self._model  # what is called
        self._judge = task.build_model().to(device)
        self._train, self._test = task.train.to(device), task.test.to(device)

    def run(self) -> Trained:
        chosen = CASES[self._case]
        if chosen.algorithm == FSDP:
            shard_model(self._model, self._device, chosen.options)
        kind = optimizer_of(self._task.name, self._case)
        optimizer = make_optimizer(self._case, kind, self._model, self._learning_rate, self._steps)
        with counted() as sent:
            if chosen.algorithm == FSDP:
                return self._judged(*self._loop(optimizer, sent))
            if chosen.algorithm == ERROR_FEEDBACK:
                self._wrapped = with_error_feedback(self._model, self._device, self._case)
                return self._judged(*self._loop(optimizer, sent))
            # The Bagua module; nothing of it is called but forward, so that what is trained is what a user's loop
            # trains.
            self._model.with_bagua([optimizer], make_algorithm(self._case, optimizer, self._steps))
            try:
                return self._judged(*self._loop(optimizer, sent))
            finally:
                self._model.bagua_ddp.detach()

    def _loop(self, optimizer: torch.optim.Optimizer, sent: SentBytes) -> tuple[list[Kept], float]:
        wanted = set(curve_steps(self._steps))
        dist.all_reduce(torch.zeros(1, device=self._device))  # all ranks begin together
        before = sent.read()
        kept = [Kept(snapshot(self._model), 0.0)]
        batches = torch.empty(0)
        self._synchronize()
        began = time.perf_counter()
        for step in range(self._steps):
            if self._start and step == self._start:
                self._synchronize()
                self._start_seconds = time.perf_counter() - began
            epoch, place = divmod(step, self._per_epoch)
            if place == 0:
                rank, ranks = dist.get_rank(), dist.get_world_size()
                samples = len(self._train)
                batches = shard(samples, self._batch_size, self._seed, epoch, rank, ranks).to(self._device)
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * learning_rate_factor(step, self._steps)
            optimizer.zero_grad()
            self._task.training_loss(self._wrapped, self._train.take(batches[place])).backward()
            optimizer.step()
            if step + 1 in wanted and step + 1 < self._steps:
                kept.append(Kept(snapshot(self._model), sent.read() - before))
        self._synchronize()
        seconds = time.perf_counter() - began
        self._end_of_training()
        kept.append(Kept(snapshot(self._model), sent.read() - before))
        return kept, seconds

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _end_of_training(self) -> None:
        """An algorithm that communicates in the background is told to stop."""
        if CASES[self._case].algorithm == "async":
            self._model.bagua_algorithm.abort(self._model)
            seen = self._model.bagua_algorithm.staleness
            self._averages, self._staleness = seen.count, float(seen.mean)
        self._synchronize()

    def _judged(self, kept: Sequence[Kept], seconds: float) -> Trained:
        task, judge = self._task, self._judge
        averaged: list[Averaged] = [average(one.model) for one in kept]
        curve = [evaluate(task, judge, one.mean, self._test) for one in averaged]
        final, last = averaged[-1], kept[-1].model
        replica = evaluate_alone(task, judge, last, self._test).loss if final.spread else curve[-1].loss
        train = evaluate(task, judge, final.mean, (task.evaluated_train or task.train).to(self._device))
        return Trained(
            steps=self._steps,
            seconds=seconds,
            start_seconds=self._start_seconds,
            parameters=last.numel(),
            train_loss=train.loss,
            test_loss=curve[-1].loss,
            accuracy=curve[-1].accuracy,
            replica_test_loss=mean_over_ranks(replica, self._device),
            spread=final.spread,
            averages=self._averages,
            staleness=self._staleness,
            curve_steps=curve_steps(self._steps),
            curve_loss=[point.loss for point in curve],
            curve_bytes=[one.sent for one in kept],
        )


def split_sizes(task: Task) -> dict[str, int]:
    """What the documentation says of the data."""
    return {"train_samples": len(task.train), "test_samples": len(task.test)}
