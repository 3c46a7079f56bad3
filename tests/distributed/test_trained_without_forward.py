"""Modules that are trained without a forward pass in training mode, in which some algorithms begin their exchanges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import check_tensor_on_ranks, message_of
from torch import Tensor, nn

from bagua.torch_api.algorithms import Algorithm


class Net(nn.Module):
    """A method other than forward computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)

    def loss(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.layer(x))).square().mean()


class Job:
    """A wrapped Net with an optimizer for each layer, and one that with_bagua was not given."""

    def __init__(self, algorithm: str, **options: Any) -> None:
        torch.manual_seed(torch.distributed.get_rank())
        self.net: Any = Net()
        self.optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in self.net.children()]
        self.unlisted = torch.optim.SGD(self.net.parameters(), lr=0.05)
        if "decentralized" in algorithm:
            options["hierarchical"] = False
        self.net.with_bagua(self.optimizers, Algorithm.init(algorithm, **options))

    def step(self, call: Any, optimizers: Any = None) -> None:
        self.net.zero_grad()
        call(torch.randn(4, 4)).backward()
        for optimizer in self.optimizers if optimizers is None else optimizers:
            optimizer.step()

    def steps(self, count: int, call: Any = None, optimizers: Any = None) -> None:
        for _ in range(count):
            self.step(self.net.loss if call is None else call, optimizers)


def _in_evaluation(job: Job) -> None:
    job.net.eval()
    job.steps(5, job.net)


@pytest.mark.parametrize("algorithm", ["decentralized", "async"])
@on_ranks(2)
def test_ten_steps_without_a_forward_pass_are_refused(algorithm: str) -> None:
    # Two listed optimizers step in each round: these are the last two of ten steps.
    for train in (lambda job: job.steps(5), _in_evaluation):
        job = Job(algorithm)
        what, where, remedy = message_of(RuntimeError, lambda: train(job)).split("\n")  # noqa: B023
        assert "Net_" in what
        assert "10 steps" in what
        assert "step()" in where
        assert "model.train()" in remedy
        # The remedy.
        job.net.train()
        job.steps(12, job.net)
        job.net.bagua_ddp.detach()
    job = Job(algorithm)
    job.steps(4)
    job.step(job.net.loss, job.optimizers[:1])  # nine
    job.net(torch.randn(4, 4))
    job.steps(4)
    job.net.bagua_ddp.detach()


# --- what is no sign of that -----------------------------------------------------------------------------------------


def _rare_exchanges(job: Job) -> None:
    job.steps(12, job.net)


def _no_sync(job: Job) -> None:
    with job.net.bagua_ddp.no_sync():
        job.steps(12, job.net)


def _accumulation(job: Job) -> None:
    for _ in range(3):
        for _ in range(12):
            job.net(torch.randn(4, 4)).backward()
        job.step(job.net)


def _losses_between(job: Job) -> None:
    for _ in range(3):
        job.step(job.net)
        job.steps(4)


def _evaluation(job: Job) -> None:
    for _ in range(2):
        job.steps(6, job.net)
        job.net.eval()
        with torch.no_grad():
            for _ in range(12):
                job.net(torch.randn(4, 4))
        job.net.train()


def _unlisted(job: Job) -> None:
    job.steps(12, optimizers=[job.unlisted])


def _without_gradients(job: Job) -> None:
    """Another module is trained by the same optimizers, and this one is not used for a while, or frozen."""
    for freeze in (False, True):
        job.step(job.net.loss)
        job.net.requires_grad_(not freeze)
        for _ in range(12):
            job.net.zero_grad()
            for optimizer in job.optimizers:
                optimizer.step()
        job.net.requires_grad_(True)
    job.step(job.net)


def _own_business(job: Job) -> None:
    """Gradients of inputs are none of a step."""
    for _ in range(12):
        x = torch.randn(4, 4, requires_grad=True)
        torch.autograd.grad(job.net.loss(x), x)
        for optimizer in job.optimizers:
            optimizer.step()


INNOCENT = (
    _rare_exchanges,
    _no_sync,
    _accumulation,
    _losses_between,
    _evaluation,
    _unlisted,
    _without_gradients,
    _own_business,
)


@pytest.mark.parametrize("algorithm", ["decentralized", "async"])
@on_ranks(2)
def test_healthy_training_is_not_taken_for_that(algorithm: str) -> None:
    options = {"communication_interval": 1000} if algorithm == "decentralized" else {"sync_interval_ms": 0}
    for situation in INNOCENT:
        job = Job(algorithm, **options)
        situation(job)
        job.net.bagua_ddp.detach()
    if algorithm == "async":
        job = Job(algorithm, warmup_steps=12)
        job.steps(12)  # gradients are sent, whatever made them
        check_tensor_on_ranks(job.net.layer.weight, "weights after the warm-up")
        job.step(job.net)
        job.net.bagua_algorithm.abort(job.net)
        job.steps(12)  # nobody wants an average
        job.net.bagua_algorithm.resume(job.net)
        job.steps(12)  # averages go on without forward passes
        job.net.bagua_algorithm.abort(job.net)
        check_tensor_on_ranks(job.net.layer.weight, "averaged weights")


@on_ranks(1)
def test_one_rank_alone_has_nobody_to_exchange_with() -> None:
    for algorithm in ("decentralized", "async"):
        Job(algorithm).steps(12)


@on_ranks(2)
def test_other_algorithms_communicate_without_a_forward_pass() -> None:
    """Algorithms that communicate after gradients or steps need no forward pass."""
    for algorithm in ("gradient_allreduce", "bytegrad", "low_precision_decentralized"):
        for is_training in (True, False):
            job = Job(algorithm)
            job.net.train(is_training)
            job.steps(12)
            job.steps(2, job.net)
            weights = [parameter.detach() for parameter in job.net.parameters()]
            if algorithm == "low_precision_decentralized":
                (bucket,) = job.net.bagua_buckets
                # Of two ranks each is the other's neighbor.
                both = bucket._weight + bucket._left_peer_weight
                weights = [both, bucket._left_peer_weight - bucket._right_peer_weight]
            for weight in weights:
                check_tensor_on_ranks(weight, algorithm)
            job.net.bagua_ddp.detach()
