"""Asynchronous model averaging: what an average does to replicas, optimizers and wrappers. The warm-up:
test_async_warmup.py; the end: test_async_ends.py; that no order of calls hangs: test_async_schedules.py."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.async_runs import DEADLINE_S, Run, sgd, threads, until
from support.rank_tests import on_ranks
from support.sweeps import rest_is_deep
from support.training import (
    OPTIMIZERS,
    Branches,
    MixedDtypes,
    NormNet,
    Scaled,
    batches,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    loss_of,
    message_of,
    mlp,
    train,
    with_algorithm,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

# --- what an average does --------------------------------------------------------------------------------------------


def _mean(parameter: Tensor) -> Tensor:
    wide = parameter.detach().to(torch.complex128 if parameter.is_complex() else torch.float64, copy=True)
    real = torch.view_as_real(wide.contiguous()) if wide.is_complex() else wide
    dist.all_reduce(real)
    return wide / dist.get_world_size()


def _is_close(one: Tensor, other: Tensor) -> bool:
    tolerance = 1e-2 if one.dtype in (torch.float16, torch.bfloat16) else 1e-5
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)


class _HalfIn(nn.Module):
    """Parameters of float16 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8, dtype=torch.float16)
        self.second = nn.Linear(8, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.half()).bfloat16())


@pytest.mark.parametrize(("ranks", "build"), [(2, MixedDtypes), (3, mlp), (2, _HalfIn), (2, Scaled)])
@on_ranks()
def test_an_average_moves_replicas_to_their_mean_and_not_the_mean(
    rank: int, device: torch.device, build: Callable[[], nn.Module]
) -> None:
    """With lr = 0, from replicas that differ: every rank is given the mean, and the mean does not move."""
    torch.manual_seed(0)
    run = Run(rank, device, build().to(device), make=lambda parameters: sgd(parameters, lr=0.0))
    parameters = list(run.net.parameters())
    with torch.no_grad():
        torch.manual_seed(rank + 1)
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter))
    means = [_mean(parameter) for parameter in parameters]

    # An addition may come from a copy that the loop had before the parameters were made to differ.
    run.train_until_averaged(batches(rank, 1, device), times=4)
    for parameter, mean in zip(parameters, means, strict=True):
        assert _is_close(parameter, mean.to(parameter.dtype)), (parameter, mean)
    run.abort()
    for parameter, mean in zip(parameters, means, strict=True):
        check_tensor_on_ranks(torch.view_as_real(parameter) if parameter.is_complex() else parameter, "after abort")
        assert _is_close(parameter, mean.to(parameter.dtype))


@pytest.mark.parametrize("ranks", rest_is_deep([2, 3], 0))
@on_ranks()
def test_ranks_at_different_paces(rank: int, device: torch.device) -> None:
    """With data of their own: abort brings them together, and the loss has fallen."""
    run = Run(rank, device, make=OPTIMIZERS["momentum"])
    probe, data = batches(7, 1, device)[0], batches(7, 20, device)  # alike, so that the loss of all falls
    before = float(loss_of(run.net, probe).detach())
    for epoch in range(3):
        run.train(data * (rank + 2))
        run.train_until_averaged(data[:1])
        run.abort()
        check_ranks_equal(run.net, f"epoch {epoch}")
        assert (run.algorithm.status, threads()) == ("stopped", 0)
        kept = copy.deepcopy(run.net)
        run.net.eval()
        loss_of(run.net, probe)
        run.net.train()
        check_equal(run.net, kept, "nothing moves while it is stopped")
        run.resume()
        assert (run.algorithm.status, threads()) == ("running", 1)
    run.abort()
    assert float(loss_of(run.net, probe).detach()) < before
    staleness = run.algorithm.staleness
    assert 0 <= staleness.last <= staleness.largest <= staleness.total
    assert staleness.count >= 3
    assert staleness.mean == staleness.total / staleness.count <= staleness.largest


@on_ranks(1)
def test_one_rank_alone(rank: int, device: torch.device) -> None:
    run, other = Run(rank, device, warmup=3), mlp(0, device)
    data = batches(rank, 10, device)
    run.train(data)
    assert (run.algorithm.status, threads()) == ("running", 0)
    run.abort()
    run.resume()
    run.train(data)
    train(other, sgd(other.parameters()), data * 2)
    check_equal(run.net, other)
    for stranger in (other, Run(rank, device).net, None):
        told = message_of(ValueError, lambda: run.algorithm.abort(stranger))  # noqa: B023
        assert "is not trained by this algorithm" in told


# --- optimizers and wrappers -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_optimizer_has_its_own_safe_point(rank: int, device: torch.device) -> None:
    """A graph over the second part is alive while the first part is stepped: its parameters may not change then."""
    torch.manual_seed(rank)
    net: Any = nn.ModuleDict({"first": nn.Linear(2, 4), "second": nn.Linear(2, 4), "rest": nn.Linear(4, 4)}).to(device)
    net.forward = lambda x: net["first"](x) + net["second"](x)
    one, other = sgd(net["first"].parameters()), sgd(net["second"].parameters())
    unlisted = sgd(net["rest"].parameters(), lr=0.01)
    net.with_bagua([one, other], AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=0))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(rank)
    x = torch.randn(4, 2, device=device, requires_grad=True)  # so that backward uses the weights
    algorithm = net.bagua_algorithm
    parts = [net["first"].bias, net["second"].bias, net["rest"].bias]

    def step() -> None:
        net.zero_grad()
        net(x)  # begins a step
        fake = net["second"](x)
        net["first"](x).square().sum().mul(1e-9).backward()
        one.step()
        net["rest"](fake).square().sum().mul(1e-9).backward()
        other.step()
        unlisted.step()

    means = [_mean(part) for part in parts]

    def have_met() -> bool:
        return all(torch.allclose(part, mean.float(), atol=1e-2) for part, mean in zip(parts, means, strict=True))

    until(have_met, step)
    algorithm.abort(net)
    check_ranks_equal(nn.ParameterList(net.parameters()))


@pytest.mark.parametrize("listed", [True, False])
@on_ranks(2)
def test_the_wrapper(rank: int, device: torch.device, listed: bool) -> None:
    """Buffers, and parameters that are not used: nothing is broadcast or agreed upon step by step after the warm-up, so
    that ranks may make unequally many steps. Without a listed optimizer as well."""
    torch.manual_seed(rank)
    for kind in (NormNet, Branches):
        how = "wrapper" + ("" if listed else " unlisted") + (" finding unused" if kind is Branches else "")
        run = Run(rank, device, kind().to(device), how=how, warmup=2)
        model, data = run.model, batches(rank, 40, device)
        message_of(NotImplementedError, model.join, "begins to in some step")
        run.train(data[: 20 + 20 * rank])

        def step(model: Any = model, run: Run = run, data: Any = data) -> None:
            loss_of(model, data[0])
            with model.no_sync():
                two = loss_of(model, data[1]) + loss_of(model, data[2])
            two.backward()  # of parameters that are what they were in both forward passes
            run.optimizer.step()

        until(lambda: run.algorithm.staleness.count > 20, step)  # noqa: B023
        run.abort()
        check_ranks_equal(nn.ParameterList(run.net.parameters()))
        run.algorithm.resume(model.inner)
        run.algorithm.abort(run.net)


@on_ranks(2)
def test_parameters_may_be_frozen_meanwhile(rank: int, device: torch.device) -> None:
    """While the loop runs, which goes on; what is frozen when it is resumed keeps the mean."""
    run = Run(rank, device)
    layer, data = run.net[0], batches(rank, 30, device)
    run.train(data[: 10 + 5 * rank])
    layer.requires_grad_(False)
    run.train(data[:1])
    run.abort()
    kept = layer.weight.detach().clone()
    check_tensor_on_ranks(kept, "frozen")
    run.algorithm.resume(run.model)
    run.train(data[:20])
    assert torch.equal(layer.weight, kept)
    layer.requires_grad_(True)
    run.train(data[: 20 - 5 * rank])
    run.abort()
    check_ranks_equal(run.net)


@on_ranks(2)
def test_another_algorithm_takes_over(rank: int, device: torch.device) -> None:
    """The loop ends, on all ranks, and what follows begins at the mean."""
    run = Run(rank, device, make=lambda parameters: sgd(parameters, lr=0.0), interval_ms=500)
    net, reference = run.net, mlp(rank, device)
    run.train(batches(rank, 3, device))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float(rank))
    bagua.barrier()  # not to overwrite what a rank was given that is ahead
    with_algorithm(net, run.optimizer)
    assert threads() == 0
    check_ranks_equal(net)
    for parameter in net.parameters():  # an exchange that was under way may have rounded
        assert torch.allclose(parameter, torch.full_like(parameter, 0.5), atol=1e-5)
    reference.load_state_dict(net.state_dict())
    other = sgd(reference.parameters(), lr=0.0)
    with_algorithm(reference, other)
    data = batches(rank, 5, device)
    train(net, run.optimizer, data)
    train(reference, other, data)
    check_equal(net, reference)
    # And back, one rank not having made a step.
    again = Run(rank, device, net)
    if rank == 0:
        again.train(data)
    with_algorithm(net, again.optimizer)
    assert threads() == 0


@on_ranks(2)
def test_the_operation_of_a_bucket(rank: int, device: torch.device) -> None:
    """`append_asynchronous_model_average_op`, by the engine of an algorithm that marks parameters."""
    tensor: Any = torch.full((5,), float(rank), device=device)
    tensor.ensure_bagua_tensor("x", "module")
    from bagua.torch_api.bucket import BaguaBucket

    bucket = BaguaBucket([tensor], "0", flatten=True)
    op = bucket.append_asynchronous_model_average_op(peer_selection_mode="all")
    op.run(bucket)
    assert torch.equal(tensor, torch.full_like(tensor, 0.5))
    if rank == 0:
        op.abort()
    assert int(op.get_status()) == (1 if rank == 0 else 0)
    tensor.fill_(float(rank))
    op.lock_weight()
    thread = threading.Thread(target=lambda: op.run(bucket), daemon=True)
    thread.start()
    tensor.add_(10)
    op.unlock_weight()
    thread.join(DEADLINE_S)
    total = tensor.clone()  # whether the copies were made before or after the addition
    dist.all_reduce(total)
    assert torch.allclose(total, torch.full_like(total, 21.0))
    op.abort()
    op.run(bucket)
    assert int(op.get_status()) == 2
    tensor.fill_(float(rank))
    op.run(bucket)
    assert torch.equal(tensor, torch.full_like(tensor, float(rank)))
    op.reset()
    op.run(bucket)
    assert torch.equal(tensor, torch.full_like(tensor, 0.5))
    assert "'all'" in message_of(ValueError, lambda: bucket.append_asynchronous_model_average_op("shift_one"))


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"peer_selection_mode": "shift_one"}, "'shift_one'"),
        ({"sync_interval_ms": float("nan")}, "sync_interval_ms=nan"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Algorithm.init("async", **arguments)
