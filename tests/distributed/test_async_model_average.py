"""Asynchronous model averaging: warm-up, what an average does to replicas, other optimizers and wrappers, the end of a
run, errors. That no order of calls hangs: test_async_schedules.py."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    OPTIMIZERS,
    Branches,
    MixedDtypes,
    NormNet,
    Scaled,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    train,
    with_algorithm,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.job.failure_report import CollectiveError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm
from bagua.torch_api.data_parallel import DistributedDataParallel

DEADLINE_S = 30.0
THREAD = "bagua-average"


def _sgd(module: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr)


def _wrap(module: Any, optimizers: Sequence[torch.optim.Optimizer], interval_ms: float = 0, warmup: int = 0) -> Any:
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=interval_ms, warmup_steps=warmup)
    return module.with_bagua(list(optimizers), algorithm)


def _until(condition: Callable[[], bool], between: Callable[[], Any] = lambda: time.sleep(0.001)) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        between()


def _threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


# --- warm-up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "optimizer"), [("with_bagua", "momentum"), ("wrapper", "adam")])
@on_ranks(2)
def test_the_warm_up_is_gradient_all_reduce_bit_for_bit(
    rank: int, device: torch.device, how: str, optimizer: str
) -> None:
    ours, theirs = mlp(rank, device), mlp(rank, device)
    our_optimizer, their_optimizer = (OPTIMIZERS[optimizer](net.parameters()) for net in (ours, theirs))
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=10)
    model: Any = ours
    if how == "wrapper":
        model = DistributedDataParallel(ours, optimizers=[our_optimizer], algorithm=algorithm)
    else:
        ours.with_bagua([our_optimizer], algorithm)
    with_algorithm(theirs, their_optimizer)
    data = batches(rank, 12, device)
    for step in range(10):
        model.eval()
        loss_of(model, data[11])  # counts as no step
        model.train()
        assert model.bagua_algorithm.status == "warm-up"
        train(model, our_optimizer, data[step : step + 1])
        train(theirs, their_optimizer, data[step : step + 1])
        check_equal(ours, theirs, f"step {step + 1}")
    with counted_all_reduces() as calls:
        our_optimizer.zero_grad()
        loss_of(model, data[10]).backward()
    own = copy.deepcopy(ours)
    own.zero_grad()
    loss_of(own, data[10]).backward()
    for one, other in zip(ours.parameters(), own.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), "the gradient of a step after the warm-up is this rank's own"
    elements = sum(parameter.numel() for parameter in ours.parameters())
    assert all(size == elements or size == 3 for size in calls), calls  # of the background thread, if any
    assert model.bagua_algorithm.status == "running"
    model.bagua_algorithm.abort(model)


@on_ranks(2)
def test_steps_of_the_warm_up_are_passes_that_communicate(rank: int, device: torch.device) -> None:
    """Passes in no_sync, and forward passes without a backward pass, are no steps of the warm-up."""
    net = mlp(rank, device)
    optimizer = _sgd(net)
    _wrap(net, [optimizer], warmup=3)
    data = batches(rank, 4, device)
    for step in range(3):
        assert net.bagua_algorithm.state_dict() == {"warmup_steps_done": step}
        with net.bagua_ddp.no_sync():
            loss_of(net, data[0]).backward()
            loss_of(net, data[1]).backward()
        loss_of(net, data[2])
        loss_of(net, data[3]).backward()
        optimizer.step()
        optimizer.zero_grad()
        check_ranks_equal(net)
    assert net.bagua_algorithm.status == "new"
    net.bagua_algorithm.abort(net)  # finds nothing to stop on any rank
    assert net.bagua_algorithm.status == "new"
    train(net, optimizer, data[:1])
    assert net.bagua_algorithm.status == "running"
    net.bagua_algorithm.abort(net)
    check_ranks_equal(net)


@on_ranks(2)
def test_a_gradient_penalty_is_no_step_of_the_warm_up(rank: int, device: torch.device) -> None:
    """torch.autograd.grad makes a pass that is no step, though its end is one of a pass."""
    nets = [mlp(0, device), mlp(0, device)]
    optimizers = [_sgd(net) for net in nets]
    nets[0].with_bagua([optimizers[0]], Algorithm.init("gradient_allreduce"))
    _wrap(nets[1], [optimizers[1]], warmup=4)
    for x, y in batches(rank, 4, device):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            points = x.clone().requires_grad_()
            out = net(points)
            (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
            (nn.functional.mse_loss(out, y) + slope.square().mean()).backward()
            assert torch.equal(net[0].weight.grad, nets[0][0].weight.grad)
            optimizer.step()
    nets[1].bagua_algorithm.abort(nets[1])
    check_ranks_equal(nets[1])


def _aborted_often() -> float:
    """The longest wait. The interval is longer than the deadline of the test."""
    rank, device = begin()
    net: Any = mlp(0, device)
    optimizer = _sgd(net)
    _wrap(net, [optimizer], interval_ms=600_000)
    longest = 0.0
    for number in range(10):
        train(net, optimizer, batches(rank, 2, device))
        time.sleep(0.02 * ((number + rank) % 3))
        began = time.monotonic()
        net.bagua_algorithm.abort(net)
        longest = max(longest, time.monotonic() - began)
        check_ranks_equal(net)
        net.bagua_algorithm.resume(net)
    net.bagua_algorithm.abort(net)
    return longest


def test_abort_does_not_wait_for_the_interval() -> None:
    assert max(run_ranks(2, _aborted_often)) < DEADLINE_S


@on_ranks(2)
def test_a_resumed_run_goes_on_in_the_middle_of_the_warm_up(rank: int, device: torch.device) -> None:
    data = batches(rank, 12, device)
    ours, theirs = mlp(rank, device), mlp(rank, device)
    our_optimizer, their_optimizer = (OPTIMIZERS["adam"](net.parameters()) for net in (ours, theirs))
    _wrap(ours, [our_optimizer], interval_ms=1000, warmup=8)
    train(ours, our_optimizer, data[:5])
    saved = copy.deepcopy((ours.state_dict(), our_optimizer.state_dict(), ours.bagua_ddp.state_dict()))
    train(ours, our_optimizer, data[5:8])
    assert not ours.bagua_algorithm.ranks_in_step

    _wrap(theirs, [their_optimizer], interval_ms=1000, warmup=8)
    theirs.load_state_dict(saved[0])
    their_optimizer.load_state_dict(saved[1])
    theirs.bagua_ddp.load_state_dict(saved[2])
    train(theirs, their_optimizer, data[5:8])
    assert theirs.bagua_algorithm.status == "new"
    check_equal(ours, theirs)
    assert theirs.bagua_ddp.state_dict() == ours.bagua_ddp.state_dict()

    # A state from behind the warm-up skips it.
    later = mlp(rank, device)
    optimizer = _sgd(later)
    _wrap(later, [optimizer], warmup=8)
    later.bagua_ddp.load_state_dict(ours.bagua_ddp.state_dict())
    train(later, optimizer, data[:1])
    assert later.bagua_algorithm.status == "running"
    message_of(RuntimeError, lambda: later.bagua_ddp.load_state_dict(saved[2]), "5 of 8 warm-up steps")
    other = {**saved[2], "algorithm": {}}
    error = message_of(ValueError, lambda: later.bagua_ddp.load_state_dict(other))
    assert "AsyncModelAverageAlgorithmImpl needs ['warmup_steps_done']" in error
    assert "GradientAllReduce" not in error
    later.bagua_algorithm.abort(later)


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
    net = build().to(device)
    optimizer = _sgd(net, lr=0.0)
    _wrap(net, [optimizer])
    with torch.no_grad():
        torch.manual_seed(rank + 1)
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter))
    means = [_mean(parameter) for parameter in net.parameters()]
    data = batches(rank, 1, device)
    algorithm = net.bagua_algorithm
    parameters = list(net.parameters())

    # An addition may come from a copy that the loop had before the parameters were made to differ.
    _until(lambda: algorithm.staleness.count >= 4, lambda: train(net, optimizer, data))
    for parameter, mean in zip(parameters, means, strict=True):
        assert _is_close(parameter, mean.to(parameter.dtype)), (parameter, mean)
    algorithm.abort(net)
    for parameter, mean in zip(parameters, means, strict=True):
        check_tensor_on_ranks(torch.view_as_real(parameter) if parameter.is_complex() else parameter, "after abort")
        assert _is_close(parameter, mean.to(parameter.dtype))
    return [algorithm.staleness.last, algorithm.staleness.largest]


def _drifting_replicas() -> tuple[int, int, float]:
    """Ranks at different paces, with data of their own: abort brings them together, and the loss has fallen."""
    rank, device = begin()
    net = mlp(rank, device)
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    _wrap(net, [optimizer], interval_ms=0)
    algorithm = net.bagua_algorithm
    probe = batches(7, 1, device)[0]
    before = float(loss_of(net, probe).detach())
    data = batches(7, 20, device)  # alike, so that the loss of all falls
    for epoch in range(3):
        train(net, optimizer, data * (rank + 2))
        seen = algorithm.staleness.count
        _until(lambda: algorithm.staleness.count > seen, lambda: train(net, optimizer, data[:1]))  # noqa: B023
        algorithm.abort(net)
        check_ranks_equal(net, f"epoch {epoch}")
        assert algorithm.status == "stopped"
        assert _threads() == 0
        kept = copy.deepcopy(net)
        net.eval()
        float(loss_of(net, probe).detach())
        net.train()
        check_equal(net, kept, "nothing moves while it is stopped")
        algorithm.resume(net)
        assert algorithm.status == "running"
        assert _threads() == 1
    algorithm.abort(net)
    assert float(loss_of(net, probe).detach()) < before
    staleness = algorithm.staleness
    assert staleness.last <= staleness.largest <= staleness.total
    assert staleness.mean == staleness.total / staleness.count
    return staleness.count, staleness.largest, staleness.mean


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_at_different_paces(ranks: int) -> None:
    if ranks == 1:
        return run_ranks(1, _alone)[0]
    for count, largest, mean in run_ranks(ranks, _drifting_replicas):
        assert count >= 3
        assert 0 <= mean <= largest
    return None


def _alone() -> None:
    rank, device = begin()
    ours, theirs = mlp(0, device), mlp(0, device)
    our_optimizer, their_optimizer = _sgd(ours), _sgd(theirs)
    _wrap(ours, [our_optimizer], warmup=3)
    data = batches(rank, 10, device)
    train(ours, our_optimizer, data)
    assert ours.bagua_algorithm.status == "running"
    assert _threads() == 0
    ours.bagua_algorithm.abort(ours)
    ours.bagua_algorithm.resume(ours)
    train(ours, our_optimizer, data)
    train(theirs, their_optimizer, data * 2)
    check_equal(ours, theirs)


# --- optimizers and wrappers -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_each_optimizer_has_its_own_safe_point(rank: int, device: torch.device) -> None:
    """A graph over the second part is alive while the first part is stepped: its parameters may not change then."""
    torch.manual_seed(rank)
    net: Any = nn.ModuleDict({"first": nn.Linear(2, 4), "second": nn.Linear(2, 4), "rest": nn.Linear(4, 4)}).to(device)
    net.forward = lambda x: net["first"](x) + net["second"](x)
    one, other = _sgd(net["first"]), _sgd(net["second"])
    unlisted = _sgd(net["rest"], lr=0.01)
    _wrap(net, [one, other])
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

    _until(have_met, step)
    algorithm.abort(net)
    check_ranks_equal(nn.ParameterList(net.parameters()))


@pytest.mark.parametrize("listed", [True, False])
@on_ranks(2)
def test_the_wrapper(rank: int, device: torch.device, listed: bool) -> None:
    """Buffers, and parameters that are not used: nothing is broadcast or agreed upon step by step after the warm-up, so
    that ranks may make unequally many steps. Without a listed optimizer as well."""
    torch.manual_seed(rank)
    for net, shape in ((NormNet(), (4, 2)), (Branches(), (4, 2))):
        net.to(device)
        optimizer = _sgd(net)
        model: Any = DistributedDataParallel(
            net,
            find_unused_parameters=isinstance(net, Branches),
            optimizers=[optimizer] if listed else [],
            algorithm=AsyncModelAverageAlgorithm(sync_interval_ms=0, warmup_steps=2),
        )
        assert "begins to in some step" in message_of(NotImplementedError, model.join)
        data = batches(rank, 40, device, shape)
        train(model, optimizer, data[: 20 + 20 * rank])
        algorithm = model.bagua_algorithm

        def step(model: Any = model, optimizer: torch.optim.Optimizer = optimizer, data: Any = data) -> None:
            loss_of(model, data[0])
            with model.no_sync():
                two = loss_of(model, data[1]) + loss_of(model, data[2])
            two.backward()  # of parameters that are what they were in both forward passes
            optimizer.step()

        _until(lambda: algorithm.staleness.count > 20, step)  # noqa: B023
        algorithm.abort(model)
        check_ranks_equal(nn.ParameterList(net.parameters()))
        algorithm.resume(model.inner)
        algorithm.abort(net)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
@on_ranks(2)
def test_abort_and_resume(rank: int, device: torch.device, how: str, warmup: int) -> None:
    """20 ms, abort and resume again and again."""
    net = mlp(rank, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=20, warmup_steps=warmup)
    model: Any = net
    if how == "wrapper":
        model = DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
    else:
        net.with_bagua([optimizer], algorithm)
    data = batches(rank, 10, device)
    for _ in range(2):
        for _ in range(3):
            train(model, optimizer, data)
        model.bagua_algorithm.abort(model)
        model.bagua_algorithm.resume(model)
    train(model, optimizer, data)
    model.bagua_algorithm.abort(model)
    model.bagua_algorithm.abort(model)
    check_ranks_equal(net)


@on_ranks(2)
def test_parameters_may_be_frozen_meanwhile(rank: int, device: torch.device) -> None:
    """Parameters are frozen while the loop runs: all ranks start anew, from the mean."""
    net = mlp(rank, device)
    optimizer = _sgd(net)
    _wrap(net, [optimizer])
    data = batches(rank, 30, device)
    train(net, optimizer, data[: 10 + 5 * rank])
    net[0].requires_grad_(False)
    train(net, optimizer, data[:1])
    kept = net[0].weight.detach().clone()
    check_tensor_on_ranks(kept, "frozen")
    train(net, optimizer, data[:20])
    assert torch.equal(net[0].weight, kept)
    net[0].requires_grad_(True)
    train(net, optimizer, data[: 20 - 5 * rank])
    net.bagua_algorithm.abort(net)
    check_ranks_equal(net)


@on_ranks(2)
def test_another_algorithm_takes_over(rank: int, device: torch.device) -> None:
    """The loop ends, on all ranks, and what follows begins at the mean."""
    net, reference = mlp(rank, device), mlp(rank, device)
    optimizer, other = _sgd(net, lr=0.0), _sgd(reference, lr=0.0)
    _wrap(net, [optimizer], interval_ms=500)
    train(net, optimizer, batches(rank, 3, device))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(float(rank))
    bagua.barrier()  # not to overwrite what a rank was given that is ahead
    with_algorithm(net, optimizer)
    assert _threads() == 0
    check_ranks_equal(net)
    for parameter in net.parameters():  # an exchange that was under way may have rounded
        assert torch.allclose(parameter, torch.full_like(parameter, 0.5), atol=1e-5)
    reference.load_state_dict(net.state_dict())
    with_algorithm(reference, other)
    data = batches(rank, 5, device)
    train(net, optimizer, data)
    train(reference, other, data)
    check_equal(net, reference)
    # And back, one rank not having made a step.
    _wrap(net, [optimizer])
    if rank == 0:
        train(net, optimizer, data)
    with_algorithm(net, optimizer)
    assert _threads() == 0


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


# --- ends and errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [(0, 1), (0,)])
@on_ranks(2)
def test_a_module_that_is_dropped_ends_its_loop(rank: int, device: torch.device, trains: Sequence[int]) -> None:
    net = mlp(rank, device)
    optimizer = _sgd(net)
    groups = len(dist.distributed_c10d._world.pg_map)
    _wrap(net, [optimizer], interval_ms=10)
    if rank in trains:
        train(net, optimizer, batches(rank, 5, device))
    assert _threads() == 1
    engine = weakref.ref(net.bagua_ddp)
    del net, optimizer
    gc.collect()
    assert engine() is None
    _until(lambda: _threads() == 0)
    _until(lambda: len(dist.distributed_c10d._world.pg_map) <= groups)  # an earlier one may end, too


def _killed() -> tuple[str, tuple[int, ...]]:
    rank, device = begin_to_lose_one()
    net = mlp(rank, device)
    optimizer = _sgd(net)
    _wrap(net, [optimizer], interval_ms=0)
    data = batches(rank, 5, device)
    algorithm = net.bagua_algorithm
    if rank == VICTIM:
        _until(lambda: algorithm.staleness.count >= 2, lambda: train(net, optimizer, data))
        die()
    with pytest.raises(CollectiveError) as raised:
        _until(lambda: False, lambda: train(net, optimizer, data))
    assert algorithm.status == "failed"
    assert message_of(CollectiveError, lambda: algorithm.abort(net)) == str(raised.value)
    net.bagua_ddp.detach()  # does not wait for anybody
    return str(raised.value), raised.value.missing_ranks


def test_survivors_name_the_rank_that_died() -> None:
    told = run_ranks(3, _killed, expect_death={VICTIM}, timeout=50)
    for message, missing in (told[0], told[2]):
        assert missing == (VICTIM,), message
        assert f"rank {VICTIM}" in message
        assert "averag" in message


@on_ranks(2, fresh=True)
def test_shutting_torch_down_while_the_loop_runs_is_an_error_of_the_next_step(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = _sgd(net)
    _wrap(net, [optimizer], interval_ms=1)
    data = batches(rank, 5, device)
    train(net, optimizer, data)
    dist.destroy_process_group()
    message = message_of(RuntimeError, lambda: _until(lambda: False, lambda: train(net, optimizer, data)))
    assert "abort(model) on every rank before destroy_process_group()" in message


FORGETFUL = """
import sys, torch, torch.distributed as dist
import bagua.torch_api as bagua
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
bagua.init_process_group()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20))
for _ in range(20 + 20 * rank):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_program_that_forgets_abort_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
            assert "Traceback" not in output, output
            assert "abort(model)" not in output, "the ranks found each other ending"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


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


@on_ranks(1)
def test_a_model_of_somebody_else(rank: int, device: torch.device) -> None:
    net, other = mlp(rank, device), mlp(rank, device)
    _wrap(net, [_sgd(net)], interval_ms=-1)
    for stranger in (other, None):
        assert "is not trained by this algorithm" in message_of(
            ValueError,
            lambda: net.bagua_algorithm.abort(stranger),  # noqa: B023
        )
