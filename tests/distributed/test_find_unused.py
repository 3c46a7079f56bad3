"""Parameters that a backward pass does not reach: with find_unused_parameters, and without."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    Batch,
    Branches,
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    loss_of,
    message_of,
    torch_ddp,
    with_algorithm,
)
from torch import nn

from bagua.torch_api.data_parallel import DistributedDataParallel

# Which branches each rank takes, step by step.
PLANS: dict[str, list[list[tuple[str, ...]]]] = {
    "the same": [[("left",)], [("left",)]],
    "by rank": [[("left",)], [("right",)]],
    "by step": [[("left",), ("right",), ("left", "right")], [("left",), ("right",), ("left", "right")]],
    "by rank and step": [[("left",), ("left", "right"), ("right",)], [("right",), ("left",), ("right",)]],
}


def _branches(rank: int, device: torch.device) -> tuple[Branches, Branches]:
    torch.manual_seed(rank)
    net = Branches().to(device)
    return net, copy.deepcopy(net)


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def _train(model: Any, optimizer: torch.optim.Optimizer, data: Sequence[Batch], plan: Sequence[Sequence[str]]) -> None:
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss_of(model, batch, take=plan[number % len(plan)]).backward()
        optimizer.step()


def _against_ddp(plan: str, options: dict[str, Any]) -> None:
    rank, device = begin()
    ours, theirs = _branches(rank, device)
    optimizer, other = _adam(ours), _adam(theirs)
    wrapped = DistributedDataParallel(ours, find_unused_parameters=True, optimizers=[optimizer], **options)
    reference = torch_ddp(theirs, find_unused_parameters=True)
    never = copy.deepcopy(ours.never)
    for part in range(4):
        data = batches(rank, 4, device, seed=part)
        _train(wrapped, optimizer, data, PLANS[plan][rank])
        _train(reference, other, data, PLANS[plan][rank])
        check_equal(ours, theirs)
        for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), name
    # No gradient anywhere: not even weight decay touches it.
    check_equal(ours.never, never)
    assert ours.never.weight.grad is None
    check_ranks_equal(ours)


@pytest.mark.parametrize("plan", PLANS)
def test_branches_as_with_torch_ddp(plan: str) -> None:
    run_ranks(2, _against_ddp, plan, {})


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": False}], ids=["small buckets", "without views"]
)
def test_branches_however_gradients_lie(options: dict[str, Any]) -> None:
    run_ranks(2, _against_ddp, "by rank and step", options)


@on_ranks(2)
def test_gradients_of_earlier_passes_count(rank: int, device: torch.device) -> None:
    """A branch that only an earlier pass took has a gradient, which counts."""
    ours, theirs = _branches(rank, device)
    wrapped = DistributedDataParallel(ours, find_unused_parameters=True)
    reference = torch_ddp(theirs, find_unused_parameters=True)
    first, second, third = batches(rank, 3, device)
    for model in (wrapped, reference):
        with model.no_sync():
            loss_of(model, first, take=("left", "right") if rank else ("left",)).backward()
        loss_of(model, second, take=("left",)).backward()
        loss_of(model, third, take=("right",) if rank else ("left",)).backward()
    for (name, mine), its in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if its.grad is None:
            assert mine.grad is None, name
        else:
            assert torch.equal(mine.grad, its.grad), name


class ThreeLayers(nn.Module):
    """The last layer is used if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 10, bias=False)
        self.fc2 = nn.Linear(10, 4, bias=False)
        self.fc3 = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, use_last: bool) -> torch.Tensor:
        x = self.fc2(torch.relu(self.fc1(x)))
        return self.fc3(x) if use_last else x


def _listed(find_unused: bool) -> list[list[str]]:
    rank, device = begin()
    net = DistributedDataParallel(ThreeLayers().to(device), find_unused_parameters=find_unused)
    listed = []
    for use_last in (not find_unused, not find_unused, True):
        batch = batches(rank, 1, device)[0]
        loss_of(net, batch, use_last=use_last).backward()
        listed.append([name for name, _ in net.bagua_build_params()])
    return listed


def test_the_parameters_that_were_used() -> None:
    fewer, every = ["fc1.weight", "fc2.weight"], ["fc1.weight", "fc2.weight", "fc3.weight"]
    assert run_ranks(2, _listed, True) == [[fewer, fewer, every]] * 2
    assert run_ranks(2, _listed, False) == [[every] * 3] * 2


# --- without find_unused_parameters ----------------------------------------------------------------------------------


def _missing(how: str, missing_on: int, small_buckets: bool) -> str | None:
    rank, device = begin()
    net, _ = _branches(rank, device)
    del net.never
    optimizer = _adam(net)
    if how == "wrapper":
        cap = 1e-6 if small_buckets else 25
        model: Any = DistributedDataParallel(net, bucket_cap_mb=cap, optimizers=[optimizer])
    else:
        model = with_algorithm(net, optimizer)
    good, bad, _ = batches(rank, 3, device)
    loss_of(model, good, take=("left", "right")).backward()
    optimizer.step()
    if rank != missing_on:
        return None  # its backward pass would wait for the other
    optimizer.zero_grad()
    loss_of(model, bad, take=("left",)).backward()
    at_step = message_of(RuntimeError, optimizer.step)
    # The error is told once; another step in the same state would tell it again.
    loss_of(model, bad, take=("left",)).backward()
    at_forward = message_of(RuntimeError, lambda: model(bad[0]))
    assert at_step.replace("before optimizer.step()", "before the next forward pass") == at_forward
    return at_step


@pytest.mark.parametrize("small_buckets", [False, True])
@pytest.mark.parametrize("how", ["with_bagua", "wrapper"])
def test_a_missing_gradient_is_named_where_it_is_missing(how: str, small_buckets: bool) -> None:
    env = {"BAGUA_DEFAULT_BUCKET_SIZE": "1"} if small_buckets else None
    message = run_ranks(2, _missing, how, 1, small_buckets, env=env)[1]
    assert "2 of 6 parameters got no gradient" in message
    assert "right.weight" in message
    assert "right.bias" in message
    assert "trunk" not in message
    assert "left" not in message
    assert "find_unused_parameters=True to with_bagua() or to DistributedDataParallel()" in message


@on_ranks(2)
def test_a_missing_gradient_is_named_if_nothing_waits_for_it(rank: int, device: torch.device) -> None:
    """Everything before it has been sent when the pass ends."""
    net: Any = DistributedDataParallel(ThreeLayers().to(device), bucket_cap_mb=1e-6)
    x = batches(rank, 1, device)[0][0]
    net.module.fc1.register_forward_hook(lambda _module, _inputs, output: output.detach())
    net(x, use_last=True).sum().backward()
    message_of(RuntimeError, lambda: net(x, True), "1 of 3 parameters", "fc1.weight")


@on_ranks(2)
def test_training_can_go_on_after_the_error_where_all_ranks_had_it(rank: int, device: torch.device) -> None:
    """The last layer is the first in launch order: everything behind it waits."""
    net: Any = DistributedDataParallel(ThreeLayers().to(device), bucket_cap_mb=1e-6)
    optimizer = _adam(net)
    x = batches(rank, 1, device)[0][0]
    net(x, use_last=False).sum().backward()
    message_of(RuntimeError, lambda: net(x, True), "1 of 3 parameters", "fc3.weight")
    # As if nothing had happened, once the loss reaches all:
    optimizer.zero_grad()
    net(x, use_last=True).sum().backward()
    optimizer.step()
    check_ranks_equal(net)
