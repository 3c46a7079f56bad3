"""QAdam and what users do around it: scaled losses, frozen or unused parameters, dtypes. That training is resumed bit
for bit is tested with all algorithms (test_algorithms_resume)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import (
    Branches,
    MixedDtypes,
    batches,
    check_equal,
    check_ranks_equal,
    engine_of,
    loss_of,
    message_of,
    mlp,
    train,
    wrap_with,
)
from torch import nn

from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer

W = 4


def _wrap(net: Any, optimizer: QAdamOptimizer, how: str = "with_bagua", **options: Any) -> Any:
    return wrap_with(how, net, [optimizer], Algorithm.init("qadam", q_adam_optimizer=optimizer, **options))


def _trained(rank: int, device: torch.device, steps: int, how: str = "with_bagua", **options: Any) -> tuple[Any, Any]:
    net = mlp(rank, device)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=W)
    model = _wrap(net, optimizer, how, **options)
    train(model, optimizer, batches(rank, steps, device))
    return model, optimizer


@on_ranks(2)
def test_buckets_change_once_when_parameters_have_warmed_up(rank: int, device: torch.device) -> None:
    model, optimizer = _trained(rank, device, 1)
    changes = []
    steps = model.bagua_ddp._steps
    replan = steps.replan
    steps.replan = lambda *arguments, **keywords: (
        changes.append(model.bagua_train_step_counter),
        replan(*arguments, **keywords),
    )
    steps.start = None  # nothing is broadcast again
    for number, batch in enumerate(batches(rank, 3 * W, device, seed=1)):
        model.eval()
        with torch.no_grad():
            model(batch[0])
        model.train()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        loss_of(model, batch).backward()
        # Gradients stay this rank's own.
        gradients = [one.grad.clone() for one in model.parameters()]
        momenta = [optimizer.state[one]["exp_avg"].clone() for one in model.parameters()]
        optimizer.step()
        if number >= W:
            for one, gradient, momentum in zip(model.parameters(), gradients, momenta, strict=True):
                assert torch.equal(one.grad, gradient)
                assert gradient.abs().max() == 0 or not torch.equal(optimizer.state[one]["exp_avg"], momentum)
    assert changes == [W + 1]
    check_ranks_equal(model)


@on_ranks(2)
def test_a_step_without_communication(rank: int, device: torch.device) -> None:
    """A step of a rank's own gradients, on purpose: its momentum is not that of the step before."""
    model, optimizer = _trained(rank, device, W + 2)
    optimizer.zero_grad()
    with engine_of(model).no_sync():
        loss_of(model, batches(rank, 1, device, seed=1)[0]).backward()
    expected = [optimizer.state[one]["exp_avg"].lerp(one.grad, 1 - 0.9) for one in model.parameters()]
    optimizer.step()
    for one, momentum in zip(model.parameters(), expected, strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], momentum)


# --- scaled losses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
@on_ranks(2)
def test_a_gradient_scaler_that_the_algorithm_knows(rank: int, device: torch.device, clip: bool) -> None:
    """A known scaler changes nothing: the scale is a power of two. An overflow on one rank makes all skip the step."""
    results = []
    overflow_at = {2, W + 3}
    data = batches(rank, 3 * W, device)
    for scaled in (True, False):
        net = mlp(7, device)
        optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=W, weight_decay=0.01)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4, enabled=scaled)
        model = _wrap(net, optimizer, grad_scaler=scaler)
        for number, batch in enumerate(data):
            if number in overflow_at and not scaled:
                continue
            optimizer.zero_grad()
            overflows = number in overflow_at and rank == 1
            scaler.scale(loss_of(model, batch) * (float("inf") if overflows else 1.0)).backward()
            if clip:
                scaler.unscale_(optimizer)
                if number < W:  # afterwards it would be each rank's own gradient
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            before = copy.deepcopy(net.state_dict())
            scaler.step(optimizer)
            if number in overflow_at:
                for name, value in net.state_dict().items():
                    assert torch.equal(value, before[name]), (number, name)
            scaler.update()
        check_ranks_equal(net)
        if scaled:
            scales: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(scales, scaler.get_scale())
            assert set(scales) == {2.0**10}, scales  # halved twice, doubled twice
        results.append(net)
    check_equal(*results)


@pytest.mark.parametrize("unscale", [False, True])
@on_ranks(2)
def test_an_unknown_gradient_scaler_is_an_error_after_warm_up(rank: int, device: torch.device, unscale: bool) -> None:
    model, optimizer = _trained(rank, device, 0)
    scaler = torch.amp.GradScaler(device.type)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    *warm_up, last = batches(rank, W + 1, device)
    for batch in warm_up:
        step(batch)
    message_of(RuntimeError, lambda: step(last), "grad_scaler=scaler", "bfloat16")


# --- which parameters ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_layer_that_is_unfrozen_later_has_its_own_warm_up(rank: int, device: torch.device) -> None:
    """A layer that is unfrozen after the switch warms up by itself, while the others' momenta are compressed."""
    net: Any = mlp(rank, device)
    net[0].requires_grad_(False)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=W)
    _wrap(net, optimizer)
    data = batches(rank, 5 * W, device)
    kinds = []
    for number, batch in enumerate(data):
        net[0].requires_grad_(number >= 2 * W)
        net[2].requires_grad_(number != 4 * W)
        train(net, optimizer, [batch])
        kinds.append(sorted(bucket.holds_gradients for bucket in net.bagua_buckets))
    assert kinds == [[True]] * W + [[False]] * W + [[False, True]] * W + [[False]] * 2 * W
    assert [optimizer.state[one]["step"] for one in net.parameters()] == [3 * W] * 2 + [5 * W - 1] * 2 + [5 * W] * 2
    check_ranks_equal(net)


@on_ranks(2)
def test_parameters_that_are_ignored_or_of_another_optimizer(rank: int, device: torch.device) -> None:
    """An ignored parameter goes on with this rank's gradients; one of another optimizer has averaged ones."""
    net: Any = mlp(rank, device)
    net._bagua_params_and_buffers_to_ignore = ["0.bias"]
    optimizer = QAdamOptimizer([*net[0].parameters(), *net[2].parameters()], lr=0.01, warmup_steps=W)
    other = torch.optim.SGD(net[4].parameters(), lr=0.01)
    net.with_bagua([optimizer, other], QAdamAlgorithm(optimizer))
    for batch in batches(rank, 3 * W, device):
        optimizer.zero_grad()
        other.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        other.step()
    check_ranks_equal(nn.ParameterList(one for name, one in net.named_parameters() if name != "0.bias"))
    biases = [torch.empty_like(net[0].bias) for _ in range(2)]
    dist.all_gather(biases, net[0].bias.detach())
    assert not torch.equal(*biases)
    assert optimizer.state[net[0].bias]["step"] == 3 * W


@on_ranks(2)
def test_every_dtype(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    net: Any = MixedDtypes().to(device)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=W)
    _wrap(net, optimizer)
    train(net, optimizer, batches(rank, 3 * W, device))
    assert {(bucket.dtype, bucket.holds_gradients) for bucket in net.bagua_buckets} == {
        (torch.float32, False),  # of float32 and bfloat16
        (torch.float64, True),
        (torch.complex64, True),
    }
    check_ranks_equal(net)
    assert all(one.isfinite().all() for one in net.parameters())


@on_ranks(2)
def test_branches_that_not_all_ranks_take(rank: int, device: torch.device) -> None:
    """Branches that some ranks take, all take later, or none does."""
    torch.manual_seed(rank)
    net = Branches().to(device)
    optimizer = QAdamOptimizer(net.parameters(), lr=0.01, warmup_steps=W)
    model = _wrap(net, optimizer, "wrapper, finding unused")
    for number, batch in enumerate(batches(rank, 6 * W, device)):
        optimizer.zero_grad()
        take = ("left", "right") if rank == 1 and number % 2 else ("left",)
        loss_of(model, batch, take=take).backward()
        optimizer.step()
        check_ranks_equal(net, f"step {number}")
    assert optimizer.state[net.left.weight]["step"] == 6 * W
    assert optimizer.state[net.right.weight]["step"] == 3 * W
    assert net.never.weight not in optimizer.state


# --- the wrong optimizer ----------------------------------------------------------------------------


@on_ranks(1)
def test_the_wrong_optimizer(device: torch.device) -> None:
    net, other = mlp(0, device), mlp(1, device)
    optimizer, of_other = QAdamOptimizer(net.parameters()), QAdamOptimizer(other.parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    assert "SGD" in message_of(TypeError, lambda: QAdamAlgorithm(sgd))  # type: ignore[arg-type]
    for given, algorithm in (([sgd], optimizer), ([sgd], of_other)):
        said = message_of(ValueError, lambda: net.with_bagua(given, QAdamAlgorithm(algorithm)))  # noqa: B023
        assert "not among the optimizers" in said
    message_of(ValueError, lambda: net.with_bagua([of_other], QAdamAlgorithm(of_other)), "steps no parameter")


@on_ranks(2)
def test_a_copy_of_the_wrapper(rank: int, device: torch.device) -> None:
    """A copy of the wrapper has no optimizer: its gradients are averaged, those of the original are not any more."""
    model, _ = _trained(rank, device, 2 * W, "wrapper")
    duplicate = copy.deepcopy(model)
    loss_of(duplicate, batches(rank, 1, device)[0]).backward()
    check_ranks_equal(nn.ParameterList(one.grad for one in duplicate.parameters()))
    check_equal(duplicate, model)


@on_ranks(2)
def test_uneven_inputs_are_refused(rank: int, device: torch.device) -> None:
    """A rank that has run out would miss the switch."""
    for steps in (0, W + 1):
        model, _ = _trained(rank, device, steps, "wrapper")
        assert "begins to in some step" in message_of(NotImplementedError, model.join)
