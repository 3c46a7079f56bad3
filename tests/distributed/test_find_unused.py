"""Parameters that a backward pass does not reach: with find_unused_parameters, and without. Programs beside torch's
wrapper: test_step_programs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    Branches,
    batches,
    begin,
    check_ranks_equal,
    loss_of,
    message_of,
    with_algorithm,
)
from torch import nn

from bagua.torch_api.data_parallel import DistributedDataParallel


def _adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


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
    torch.manual_seed(rank)
    net = Branches().to(device)
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
