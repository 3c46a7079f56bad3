"""One training on one rank: from a seed's start to the end of the schedule, and what became of it.

Nothing but the algorithm communicates while it trains. Copies of the parameters are kept on the way; they are averaged
over the ranks and evaluated when the last step is done.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
from measure.convergence.tasks import Split, Task, build_task
from measure.convergence.traffic import SentBytes, counted
from measure.fsdp import shard_model
from measure.rank import join_bagua

# Points of a curve, the start and the end among them.
CURVE_POINTS = 17
# Evaluated at a time: what is between fits into the caches of a CPU, or nearly.
_TARGETS = 1 << 14


def shard(samples: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Indices [steps, batch_size / ranks]: this rank's part of each batch of an epoch. The batches are alike for every
    number of ranks, and no sample is in two places. What is left over comes in another epoch: each is shuffled anew."""
    ranks, steps = dist.get_world_size(), samples // batch_size
    if batch_size % ranks:
        raise ValueError(f"a batch of {batch_size} samples cannot be shared by {ranks} ranks evenly; give 2, 3 or 4")
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    return order[: steps * batch_size].view(steps, ranks, batch_size // ranks)[:, dist.get_rank()]


# --- models as vectors ------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> Tensor:
    """A copy of all parameters, one-dimensional. It changes nothing; sharded parameters are gathered, which is not
    counted as sent."""
    with torch.no_grad():
        return torch.cat([_whole(parameter.detach()).flatten() for parameter in model.parameters()])


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def average(replica: Tensor) -> tuple[Tensor, float]:
    """The mean over all ranks, and how far apart the replicas were: the length of the largest difference of a replica
    from their mean, over the length of the mean. Replicas that are equal bit for bit (0.0) stay as they are: their mean
    would be rounded."""
    low, high = replica.clone(), replica.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if torch.equal(low, high):
        return replica, 0.0
    total = replica.double()
    dist.all_reduce(total)
    mean = total / dist.get_world_size()
    away = torch.linalg.vector_norm(replica.double() - mean)
    dist.all_reduce(away, dist.ReduceOp.MAX)
    return mean.to(replica.dtype), float(away / torch.linalg.vector_norm(mean))


def evaluate(task: Task, judge: nn.Module, model: Tensor, split: Split, *, alone: bool = False) -> tuple[float, Any]:
    """The loss, as mean over all targets, and the share of the targets that is right, 0..1; None where there are no
    classes. Each rank evaluates a part of the split, and all have the same `model`; or `alone` its own, on all of it.

    Args:
        judge: a module of the task's that is wrapped by nothing; its parameters are overwritten.
    """
    device, offset = split.targets.device, 0
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # losses, right targets, targets
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    first, last = len(split) * rank // ranks, len(split) * (rank + 1) // ranks
    batch = max(1, _TARGETS * (last - first) // max(1, split.targets[first:last].numel()))
    with torch.no_grad():
        for parameter in judge.parameters():
            parameter.copy_(model[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        for begin in range(first, last, batch):
            part = split.take(torch.arange(begin, min(begin + batch, last), device=device))
            outputs = judge(part.inputs)
            count = part.targets.numel()
            sums[0] += task.loss(outputs, part.targets).double() * count
            sums[1] += task.right(outputs, part.targets)
            sums[2] += count
    if not alone:
        dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return loss / count, right / count if task.classifies else None


def mean_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    mean = float(total) / dist.get_world_size()
    return mean if math.isfinite(mean) else math.inf


# --- training ---------------------------------------------------------------------------------------------------------


def learning_rate_factor(step: int, steps: int) -> float:
    """Of step 0..steps-1: rises linearly over WARMUP_SHARE of them, and falls linearly to zero after that."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def curve_steps(steps: int) -> list[int]:
    """Numbers of steps after which a copy is kept: evenly spaced, 0 and `steps` among them, each once."""
    return sorted({round(steps * point / (CURVE_POINTS - 1)) for point in range(CURVE_POINTS)})


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


class Training:
    """Use once: `run`.

    Args:
        task: on the host.
        steps: None: those of TaskSettings; otherwise that many, with the schedule made for them.
    """

    def __init__(self, task: Task, case: str, seed: int, device: torch.device, steps: int | None = None) -> None:
        settings = TASKS[task.name]
        self._task, self._case, self._seed, self._device = task, case, seed, device
        self._batch_size = settings.batch_size
        self._per_epoch = len(task.train) // settings.batch_size
        self._steps = steps or settings.steps or (settings.epochs or 1) * self._per_epoch
        # Steps of its warm-up.
        self._start = round(CASES[case].start_share * self._steps)
        self._learning_rate = learning_rate_of(task.name, case, dist.get_world_size())
        torch.manual_seed(seed)
        self._model: Any = task.build_model().to(device)
        self._wrapped: nn.Module = self._model  # what is called
        self._judge = task.build_model().to(device)
        self._train, self._test = task.train.to(device), task.test.to(device)

    def run(self) -> dict[str, Any]:
        """Losses and accuracies are of the mean of all replicas (the common model where there is one)."""
        chosen, device = CASES[self._case], self._device
        if chosen.algorithm == FSDP:
            shard_model(self._model, device, chosen.options)
        kind = optimizer_of(self._task.name, self._case)
        optimizer = make_optimizer(self._case, kind, self._model, self._learning_rate, self._steps)
        with counted() as sent:
            if chosen.algorithm == ERROR_FEEDBACK:
                from bagua.comm_hooks import ErrorFeedbackState, error_feedback_bytegrad

                ddp = nn.parallel.DistributedDataParallel(self._model, [device] if device.type == "cuda" else None)
                ddp.register_comm_hook(ErrorFeedbackState(**chosen.options), error_feedback_bytegrad)
                self._wrapped = ddp
            if chosen.algorithm in (FSDP, ERROR_FEEDBACK):
                return self._judged(*self._loop(optimizer, sent))
            # The Bagua module; nothing of it is called but forward, so that what is trained is what a user's loop
            # trains.
            self._model.with_bagua([optimizer], make_algorithm(self._case, optimizer, self._steps))
            try:
                return self._judged(*self._loop(optimizer, sent))
            finally:
                self._model.bagua_ddp.detach()

    def _loop(
        self, optimizer: torch.optim.Optimizer, sent: SentBytes
    ) -> tuple[list[tuple[Tensor, float]], dict[str, Any]]:
        """At each point of the curve, the model and the bytes that this rank has sent until then; and how the loop
        went."""
        wanted = set(curve_steps(self._steps))
        dist.all_reduce(torch.zeros(1, device=self._device))  # all ranks begin together
        before = sent.read()
        kept = [(snapshot(self._model), 0.0)]
        batches = torch.empty(0)
        self._synchronize()
        began, start_seconds = time.perf_counter(), 0.0
        for step in range(self._steps):
            if self._start and step == self._start:
                self._synchronize()
                start_seconds = time.perf_counter() - began
            epoch, place = divmod(step, self._per_epoch)
            if place == 0:
                batches = shard(len(self._train), self._batch_size, self._seed, epoch).to(self._device)
            for group in optimizer.param_groups:
                group["lr"] = self._learning_rate * learning_rate_factor(step, self._steps)
            optimizer.zero_grad()
            self._task.training_loss(self._wrapped, self._train.take(batches[place])).backward()
            optimizer.step()
            if step + 1 in wanted and step + 1 < self._steps:
                kept.append((snapshot(self._model), sent.read() - before))
        self._synchronize()
        facts: dict[str, Any] = {"seconds": time.perf_counter() - began, "averages": None, "staleness": None}
        # Of the algorithm itself, after a start with gradient all-reduce.
        facts["steps_per_second"] = (self._steps - self._start) / (facts["seconds"] - start_seconds)
        if CASES[self._case].algorithm == "async":  # communicates in the background until it is told to stop
            self._model.bagua_algorithm.abort(self._model)
            seen = self._model.bagua_algorithm.staleness
            # How often parameters were averaged, and the mean number of steps between copy and addition.
            facts |= {"averages": seen.count, "staleness": float(seen.mean)}
        self._synchronize()
        kept.append((snapshot(self._model), sent.read() - before))
        return kept, facts

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _judged(self, kept: Sequence[tuple[Tensor, float]], facts: dict[str, Any]) -> dict[str, Any]:
        task, judge = self._task, self._judge
        averaged = [average(model) for model, _ in kept]
        curve = [evaluate(task, judge, mean, self._test) for mean, _ in averaged]
        (final, spread), last = averaged[-1], kept[-1][0]
        replica = evaluate(task, judge, last, self._test, alone=True)[0] if spread else curve[-1][0]
        of_train = (task.evaluated_train or task.train).to(self._device)
        return {
            **facts,
            "steps": self._steps,
            "parameters": last.numel(),
            "train_loss": evaluate(task, judge, final, of_train)[0],
            "test_loss": curve[-1][0],
            "accuracy": curve[-1][1],
            # Mean over the ranks of what each one's own model has.
            "replica_test_loss": mean_over_ranks(replica, self._device),
            "spread": spread,
            "curve_steps": curve_steps(self._steps),
            "curve_loss": [loss for loss, _ in curve],
            "curve_bytes": [sent for _, sent in kept],
            "train_samples": len(task.train),
            "test_samples": len(task.test),
            "source": task.source,
        }


def prepare(_: torch.device) -> None:
    join_bagua()


_task = functools.cache(build_task)


def measure(device: torch.device, task: str, variant: str, number: int, steps: int | None) -> dict[str, Any]:
    """A call of measure.rank: alike on all ranks but seconds and curve_bytes."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    trained = Training(_task(task), variant, number + 1, device, steps).run()
    # Wrappers hook themselves into the model, and so are cycles.
    gc.collect()
    return trained
