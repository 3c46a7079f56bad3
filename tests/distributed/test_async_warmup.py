"""The warm-up of asynchronous model averaging, which is gradient all-reduce."""

from __future__ import annotations

import copy

import pytest
import torch
from support.async_runs import Run
from support.rank_tests import on_ranks
from support.training import (
    OPTIMIZERS,
    batches,
    check_equal,
    check_ranks_equal,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    train,
    with_algorithm,
)


@pytest.mark.parametrize(("how", "optimizer"), [("with_bagua", "momentum"), ("wrapper", "adam")])
@on_ranks(2)
def test_the_warm_up_is_gradient_all_reduce_bit_for_bit(
    rank: int, device: torch.device, how: str, optimizer: str
) -> None:
    run = Run(rank, device, how=how, make=OPTIMIZERS[optimizer], warmup=10)
    model, theirs = run.model, mlp(rank, device)
    their_optimizer = OPTIMIZERS[optimizer](theirs.parameters())
    with_algorithm(theirs, their_optimizer)
    data = batches(rank, 12, device)
    for step in range(10):
        model.eval()
        loss_of(model, data[11])  # counts as no step
        model.train()
        assert run.algorithm.status == "warm-up"
        run.train(data[step : step + 1])
        train(theirs, their_optimizer, data[step : step + 1])
        check_equal(run.net, theirs, f"step {step + 1}")
    with counted_all_reduces() as calls:
        run.optimizer.zero_grad()
        loss_of(model, data[10]).backward()
    own = copy.deepcopy(run.net)
    own.zero_grad()
    loss_of(own, data[10]).backward()
    for one, other in zip(run.net.parameters(), own.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), "the gradient of a step after the warm-up is this rank's own"
    elements = sum(parameter.numel() for parameter in own.parameters())
    assert all(size == elements or size == 3 for size in calls), calls  # of the background thread, if any
    assert run.algorithm.status == "running"
    run.abort()


@on_ranks(2)
def test_steps_of_the_warm_up_are_passes_that_communicate(rank: int, device: torch.device) -> None:
    """Passes in no_sync, gradients of inputs, and forward passes without a backward pass are no steps of it."""
    run = Run(rank, device, warmup=3)
    net, data = run.net, batches(rank, 4, device)
    run.resume()  # finds nothing to resume
    for step in range(3):
        assert run.algorithm.state_dict() == {"warmup_steps_done": step}
        with net.bagua_ddp.no_sync():
            loss_of(net, data[0]).backward()
            loss_of(net, data[1]).backward()
        loss_of(net, data[2])
        points = data[3][0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
        (loss_of(net, data[3]) + slope.square().mean()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        check_ranks_equal(net)
    assert run.algorithm.status == "new"
    run.abort()  # finds nothing to stop on any rank
    assert run.algorithm.status == "new"
    run.train(data[:1])
    assert run.algorithm.status == "running"
    run.abort()
    check_ranks_equal(net)


@on_ranks(2)
def test_a_resumed_run_goes_on_in_the_middle_of_the_warm_up(rank: int, device: torch.device) -> None:
    data = batches(rank, 12, device)
    ours, theirs = (Run(rank, device, make=OPTIMIZERS["adam"], interval_ms=1000, warmup=8) for _ in range(2))
    engines = [run.net.bagua_ddp for run in (ours, theirs)]
    ours.train(data[:5])
    saved = copy.deepcopy([one.state_dict() for one in (ours.net, ours.optimizer, engines[0])])
    ours.train(data[5:8])
    assert not ours.algorithm.ranks_in_step
    for one, state in zip((theirs.net, theirs.optimizer, engines[1]), saved, strict=True):
        one.load_state_dict(state)
    theirs.train(data[5:8])
    assert theirs.algorithm.status == "new"
    check_equal(ours.net, theirs.net)
    assert engines[0].state_dict() == engines[1].state_dict()

    # A state from behind the warm-up skips it.
    later = Run(rank, device, warmup=8)
    engine = later.net.bagua_ddp
    engine.load_state_dict(engines[0].state_dict())
    later.train(data[:1])
    assert later.algorithm.status == "running"
    message_of(RuntimeError, lambda: engine.load_state_dict(saved[2]), "5 of 8 warm-up steps")
    error = message_of(ValueError, lambda: engine.load_state_dict({**saved[2], "algorithm": {}}))
    assert "async needs ['warmup_steps_done']" in error
    assert "GradientAllReduce" not in error
    later.abort()
