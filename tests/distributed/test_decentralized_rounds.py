"""Decentralized training in rounds that are not one forward, one backward and one step, and beside other messages."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.decentralized import BOTH, Job, Reference, mixed
from support.rank_tests import on_ranks
from support.replicas import (
    every_rank,
    flat_weights,
    train_step,
)
from support.round_situations import SITUATIONS, finish, two_losses
from support.sweeps import rest_is_deep
from support.training import (
    message_of,
    mlp,
)
from torch import Tensor, nn

from bagua.comm_ops.decentralized import PeerWeightAverage
from bagua.comm_ops.weight_exchange import MeanOfAll, MeanOfPairs
from bagua.engine.bucket import Bucket
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

# --- rounds that are not one forward, one backward and one step ------------------------------------------------------


def _accumulation_with_communication(job: Job) -> None:
    """Each pass is a round; the second begins with the first one's mean."""
    for round_number in range(3):
        job.zero_grad()
        for data in (job.data(), job.data()):
            job.loss(data).backward()
            job.reference.backward(data)
            job.reference.set_weights(job.reference.exchange())
        job.step()
        job.reference.step()
        job.check(f"round {round_number} of two passes")


def _forward_on_one_rank(job: Job) -> None:
    """A trial on one rank does not make it count differently."""
    if job.rank == 0:
        job.loss(job.data())
    else:
        job.data()
    for _ in range(3):
        job.normal_round("after a forward pass on one rank")


def _loaded_after_a_trial(job: Job) -> None:
    """What was loaded after an exchange began is not overwritten by the mean of what it replaced."""
    job.loss(job.data())
    torch.manual_seed(9)
    other = [flat_weights(mlp(seed, job.device)) for seed in (20, 21)]
    state = mlp(20 + job.rank, job.device).state_dict()
    job.net.load_state_dict(state)
    job.reference.set_weights(other)
    # The exchange that was begun in vain counts, and is that of the round.
    job.reference.exchanges += 1
    data = job.data()
    train_step(job.model, job.optimizers, data[job.rank])
    job.reference.round(data, exchange=False)
    job.check("after weights were loaded")
    job.normal_round("the next round")


def _changed_and_restored_on_one_rank(job: Job) -> None:
    """What swapping in averaged weights does: this rank goes without the mean, and nobody waits. Its peers get the mean
    of the weights of the forward pass, however late the exchange begins."""
    changed, exchanged = threading.Event(), threading.Event()
    run = PeerWeightAverage.run

    def run_late(operation: PeerWeightAverage, bucket: Bucket) -> None:
        changed.wait()
        run(operation, bucket)
        exchanged.set()

    with mock.patch.object(PeerWeightAverage, "run", run_late):
        if job.rank != 0 or job.device.type == "cuda":  # there it is queued by this thread, at once
            changed.set()
        job.loss(job.data())
        if job.rank == 0:
            state = {name: value.clone() for name, value in job.net.state_dict().items()}
            with torch.no_grad():
                for parameter in job.net.parameters():
                    parameter.zero_()
            changed.set()
            exchanged.wait()
            job.net.load_state_dict(state)
    own = job.reference.weights()[0]
    means = job.reference.exchange()
    data = job.data()
    train_step(job.model, job.optimizers, data[job.rank])
    job.reference.zero_grad()
    job.reference.backward(data)
    job.reference.set_weights([own, *means[1:]])
    job.reference.step()
    job.check("after weights were changed and restored on one rank")
    job.normal_round("the next round")


def _backward_in_no_sync(job: Job) -> None:
    """The mean is put in place before a step all the same, and the round goes on."""
    job.zero_grad()
    data = job.data()
    loss = job.loss(data)
    with job.engine.no_sync():
        loss.backward()
    job.reference.backward(data)
    finish(job, "backward in no_sync")
    data = job.data()
    train_step(job.model, job.optimizers, data[job.rank])
    job.reference.round(data, exchange=False)
    job.check("the end of that round")
    job.normal_round("the next round")


def _unseen_step(job: Job) -> None:
    """Something else than a listed optimizer changes the weights: an error, not an update that is lost."""
    data = job.data()
    job.loss(data).backward()
    with torch.no_grad():
        for parameter in job.net.parameters():
            parameter.add_(1.0)
    before = flat_weights(job.net)
    assert "exactly the optimizers that you step" in message_of(RuntimeError, lambda: job.loss(data))
    assert torch.equal(flat_weights(job.net), before)
    job.net.load_state_dict(job.reference.nets[job.rank].state_dict())
    job.reference.exchanges += 1
    job.normal_round("after the error")


def _stale_graph(job: Job) -> None:
    """A graph of the weights before the mean cannot be used after it."""
    data = job.data()
    loss = job.loss(data)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        job.loss(data)  # puts the mean in place, as if the step had been skipped
    assert "modified by an inplace operation" in message_of(RuntimeError, loss.backward)


def _interrupted(job: Job) -> None:
    """A backward pass that raises leaves the exchange for the next one."""

    def stop(_: Any) -> None:
        raise KeyError("of the user")

    loss = job.loss(job.data())
    handle = job.net[0].weight.register_hook(stop)
    assert "of the user" in message_of(KeyError, loss.backward)
    handle.remove()
    job.normal_round("after an exception")


def _wrapped_again(job: Job) -> None:
    """A mean that is under way is put in place before all begin with rank 0's weights again."""
    for _ in range(2):
        job.normal_round("before")
    job.loss(job.data())
    weights = job.reference.exchange()[0]
    job.case.wrap(job.net, job.optimizers)
    job.reference = Reference(job.reference.nets[0], 2, job.case.make_optimizers, job.case.mode)
    job.reference.set_weights([weights, weights])
    job.model = job.net
    for _ in range(2):
        job.normal_round("after")


def _frozen_meanwhile(job: Job) -> None:
    """What was trained before is mixed once more; then each rank keeps it until it is unfrozen."""
    job.normal_round("before")
    job.net[0].requires_grad_(False)
    for net in job.reference.nets:
        net[0].requires_grad_(False)
    everything = [name for name, _ in job.net.named_parameters()]
    trained = [name for name, parameter in job.net.named_parameters() if parameter.requires_grad]
    for exchanged in (everything, trained, trained):
        frozen = flat_weights(job.net)[: 2 * 10 + 10].clone()
        data = job.data()
        train_step(job.model, job.optimizers, data[job.rank])
        job.reference.zero_grad()
        job.reference.backward(data)
        means = mixed(job.reference.weights(exchanged), job.case.mode, job.reference.exchanges)
        job.reference.exchanges += 1
        job.reference.set_weights(means, exchanged)
        job.reference.step()
        job.check("with a frozen layer")
    assert torch.equal(flat_weights(job.net)[: 2 * 10 + 10], frozen)
    for net in (job.net, *job.reference.nets):
        net[0].requires_grad_(True)
    job.normal_round("unfrozen again")


OWN = (
    _accumulation_with_communication,
    _forward_on_one_rank,
    _loaded_after_a_trial,
    _changed_and_restored_on_one_rank,
    _backward_in_no_sync,
    _unseen_step,
    _stale_graph,
    _interrupted,
    _wrapped_again,
    _frozen_meanwhile,
)
# Where the optimizers' steps are not seen, the mean is put in place at the end of the first backward pass.
NOT_UNLISTED = (two_losses, _backward_in_no_sync, _unseen_step, _stale_graph, _wrapped_again, _frozen_meanwhile)


@pytest.mark.parametrize("how", rest_is_deep(["with_bagua", "with_bagua unflattened", "wrapper unlisted"], 0, 2))
@on_ranks(2)
def test_unusual_rounds(rank: int, device: torch.device, how: str) -> None:
    mode = "all" if how == "with_bagua" else "shift_one"
    for situation in (*SITUATIONS, *OWN):
        if "unlisted" in how and situation in NOT_UNLISTED:
            continue
        # After a round that is as all are, and before one.
        job = Job(rank, device, mode=mode, how=how)
        job.normal_round("the first round")
        situation(job)
        if situation not in (_stale_graph, _frozen_meanwhile):
            job.normal_round(f"after {situation.__name__}")


# --- the exchange runs meanwhile -------------------------------------------------------------------------------------


@pytest.mark.skipif(
    os.environ.get("BAGUA_TEST_DEVICE") == "cuda",
    reason="with CUDA no thread of the host takes part in an exchange; this needs one to stop it",
)
@pytest.mark.parametrize("mode", BOTH)
@on_ranks(2, fresh=True)
def test_forward_and_backward_run_while_weights_are_exchanged(rank: int, device: torch.device, mode: str) -> None:
    """It is not done before the backward pass has begun, and the pass does not wait for it."""
    kind = MeanOfPairs if mode == "shift_one" else MeanOfAll
    original = kind.mix
    backward_is_running = threading.Event()

    def mix(self: Any, values: Tensor, step: int) -> None:
        assert backward_is_running.wait(30), "the exchange was waited for before the backward pass"
        original(self, values, step)

    kind.mix = mix  # type: ignore[method-assign]
    job = Job(rank, device, mode=mode)
    job.net[0].weight.register_hook(lambda _: backward_is_running.set())
    for _ in range(3):
        backward_is_running.clear()
        job.normal_round("overlapped")


def careful(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), lr=1e-3)]


@on_ranks(3)
def test_other_communication_does_not_get_in_between(rank: int, device: torch.device) -> None:
    """Two modules, buffers that are broadcast, and a loss that the user averages, while weights are exchanged."""
    ranks = dist.get_world_size()
    jobs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net: Any = nn.Sequential(nn.Linear(2, 3000), nn.ReLU(), nn.Linear(3000, 4)).to(device)
        net.register_buffer("counter", torch.zeros(3, device=device))
        reference = Reference(net, ranks, careful, "all")
        optimizers = careful(net)
        model = DistributedDataParallel(net, optimizers=optimizers, algorithm=DecentralizedAlgorithm(False))
        jobs.append((model, net, optimizers, reference))
    for step in range(8):
        data = every_rank(step, ranks, device)
        total = 0.0
        for model, _, _, _ in jobs:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(data[rank][0]), data[rank][1])
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            total = total + loss
        total.backward()  # type: ignore[attr-defined]
        for _, net, optimizers, reference in jobs:
            for optimizer in optimizers:
                optimizer.step()
            # Buffers do not matter in training.
            reference.round(data)
            reference.check(net, rank, f"step {step}")
