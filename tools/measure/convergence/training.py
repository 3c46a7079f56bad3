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
from dataclasses import asdict, dataclass
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


# --- which samples a rank trains with ---------------------------------------------------------------------------------


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """What is left over comes in another epoch: every epoch is shuffled anew."""
    return samples // batch_size


def shard(samples: int, batch_size: int, seed: int, epoch: int, rank: int, ranks: int) -> Tensor:
    """Indices [steps, batch_size / ranks]: this rank's part of each batch of an epoch. The batches are alike for every
    number of ranks, and no sample is in two places.

    Raises:
        ValueError: fewer samples than a batch, or a batch that the ranks cannot share evenly.
    """
    steps = steps_per_epoch(samples, batch_size)
    if batch_size % ranks:
        raise ValueError(
            f"a batch of {batch_size} samples cannot be shared by {ranks} ranks evenly; use a number of ranks that"
            " divides it"
        )
    if steps < 1:
        raise ValueError(f"{samples} samples are fewer than a batch of {batch_size}")
    generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
    order = torch.randperm(samples, generator=generator)
    return order[: steps * batch_size].view(steps, ranks, batch_size // ranks)[:, rank]


def evaluation_share(samples: int, rank: int, ranks: int) -> range:
    """The part that a rank evaluates: a contiguous one, all parts together are everything."""
    return range(samples * rank // ranks, samples * (rank + 1) // ranks)


# --- models as vectors ------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> Tensor:
    """A copy of all parameters, one-dimensional. It changes nothing; sharded parameters are gathered, which is not
    counted as sent."""
    with torch.no_grad():
        return torch.cat([_whole(parameter.detach()).flatten() for parameter in model.parameters()])


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def put_back(vector: Tensor, model: nn.Module) -> None:
    """The opposite of `snapshot`: `model`'s parameters become `vector`."""
    with torch.no_grad():
        offset = 0
        for parameter in model.parameters():
            parameter.copy_(vector[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()


@dataclass(frozen=True)
class Averaged:
    """spread: how far apart the replicas were: the length of the largest difference of a replica from their mean, over
    the length of the mean. 0.0 means equal bit for bit."""

    mean: Tensor
    spread: float


def average(replica: Tensor) -> Averaged:
    """The mean over all ranks. Replicas that are equal bit for bit stay as they are: their mean would be rounded."""
    ranks = dist.get_world_size()
    low, high = replica.clone(), replica.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    if torch.equal(low, high):
        return Averaged(replica, 0.0)
    total = replica.double()
    dist.all_reduce(total)
    mean = total / ranks
    away = torch.linalg.vector_norm(replica.double() - mean)
    dist.all_reduce(away, dist.ReduceOp.MAX)
    return Averaged(mean.to(replica.dtype), float(away / torch.linalg.vector_norm(mean)))


# --- what a model is worth --------------------------------------------------------------------------------------------


# At a time: what is between fits into the caches of a CPU, or nearly.
_TARGETS = 1 << 14


@dataclass(frozen=True)
class Worth:
    """loss: mean over all targets. accuracy: part of them that is right, 0..1; None where there are no classes."""

    loss: float
    accuracy: float | None


def _sums(task: Task, model: nn.Module, split: Split) -> Tensor:
    """[sum of losses, right targets, targets] in float64."""
    device = split.targets.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    batch = max(1, _TARGETS * len(split) // max(1, split.targets.numel()))
    with torch.no_grad():
        for begin in range(0, len(split), batch):
            part = split.take(torch.arange(begin, min(begin + batch, len(split)), device=device))
            outputs = model(part.inputs)
            count = part.targets.numel()
            sums[0] += task.loss(outputs, part.targets).double() * count
            sums[1] += task.right(outputs, part.targets)
            sums[2] += count
    return sums


def _worth(task: Task, sums: Tensor) -> Worth:
    loss, right, count = sums.tolist()
    return Worth(loss / count, right / count if task.classifies else None)


def evaluate(task: Task, judge: nn.Module, model: Tensor, split: Split) -> Worth:
    """Collective: every rank has the same `model` (see replicas.snapshot) and gets the same answer.

    Args:
        judge: a module of the task's that is wrapped by nothing; its parameters are overwritten.
    """
    put_back(model, judge)
    share = evaluation_share(len(split), dist.get_rank(), dist.get_world_size())
    mine = split.take(torch.arange(share.start, share.stop, device=split.targets.device))
    sums = _sums(task, judge, mine)
    dist.all_reduce(sums)
    return _worth(task, sums)


def evaluate_alone(task: Task, judge: nn.Module, model: Tensor, split: Split) -> Worth:
    """Not collective: this rank's own model on all of the split."""
    put_back(model, judge)
    return _worth(task, _sums(task, judge, split))


def mean_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    mean = float(total) / dist.get_world_size()
    return mean if math.isfinite(mean) else math.inf


# --- training ---------------------------------------------------------------------------------------------------------


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


def prepare(_: torch.device) -> None:
    join_bagua()


@functools.cache
def _task(name: str) -> Task:
    return build_task(name)


def measure(device: torch.device, task: str, variant: str, number: int, steps: int | None) -> dict[str, Any]:
    """A call of measure.rank: the fields of Trained, alike on all ranks but seconds and curve_bytes."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
    made = _task(task)
    trained = Training(made, variant, number + 1, device, steps).run()
    # Wrappers hook themselves into the model, and so are cycles.
    gc.collect()
    sizes = {"train_samples": len(made.train), "test_samples": len(made.test)}
    return {**asdict(trained), **sizes, "source": made.source}
