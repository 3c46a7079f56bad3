"""Passes that end with an exception, and training that goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    message_of,
    pair,
)
from torch import Tensor, nn

from bagua.torch_api.data_parallel import DistributedDataParallel


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Stumbling(nn.Module):
    """Gives a loss. Raises where told to: in forward; in backward before any gradient is made, in the middle, or after
    all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, where: str = "") -> Tensor:
        if where == "forward":
            raise MemoryError
        x = x.clone().requires_grad_()
        middle = self.first(x.clone())
        loss = self.second(middle).square().mean()
        for place, tensor in (("end", x), ("middle", middle), ("start", loss)):
            if place == where:
                tensor.register_hook(_raise)
        return loss


def _raise(_: Tensor) -> None:
    raise MemoryError


@pytest.mark.parametrize("then", ["backward", "forward"])
@pytest.mark.parametrize(
    ("where", "find_unused"), [("start", False), ("middle", False), ("end", False), ("middle", True)]
)
@on_ranks(2)
def test_a_backward_pass_after_one_that_raised(
    rank: int, device: torch.device, where: str, find_unused: bool, then: str
) -> None:
    torch.manual_seed(rank)
    net = Stumbling().to(device)
    optimizer = _sgd(net)
    model = DistributedDataParallel(
        net, bucket_cap_mb=1e-6, find_unused_parameters=find_unused, gradient_as_bucket_view=find_unused
    )
    place = "beginning of a backward pass" if then == "backward" else "next forward pass"
    named = "first.weight" if where == "middle" else "not waited for"
    for x, _ in batches(rank, 2, device):
        optimizer.zero_grad()
        losses = [model(x, where), model(x)]
        message_of(MemoryError, losses[0].backward)
        optimizer.zero_grad()
        again = losses[1].backward if then == "backward" else lambda x=x: model(x).backward()
        if where == "start":
            again()
        else:
            message = message_of(RuntimeError, again)
            assert all(words in message for words in ("ended with an exception", place, named)), message
            if then == "forward":  # what was zeroed stays so
                assert all(parameter.grad is None for parameter in net.parameters())
            optimizer.zero_grad()
            model(x).backward()
        optimizer.step()
        check_ranks_equal(net)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    model(batch[0]).backward()
    optimizer.step()


def _errors(how: str, where: str) -> str | None:
    rank, device = begin()
    both = pair(how, rank, device, Stumbling)
    first, second, third = batches(rank, 3, device)
    for model, optimizer in both:
        _step(model, optimizer, first)
    ours, optimizer = both[0]
    message_of(MemoryError, lambda: ours(second[0], where).backward())
    message = None
    if where == "middle":
        # Not all ranks may have failed, so it is said once.
        message = message_of(RuntimeError, lambda: ours(third[0]))
        assert not ours.bagua_ddp.scheduler._started, "what was sent before the error has been waited for"
    for model, optimizer in both:
        _step(model, optimizer, third)
    check_equal(both[0][0], both[1][0])
    return message


@pytest.mark.parametrize("small_buckets", [True, False])
@pytest.mark.parametrize("where", ["forward", "middle"])
def test_training_goes_on_after_an_error_of_all_ranks(where: str, small_buckets: bool) -> None:
    env = {"BAGUA_DEFAULT_BUCKET_SIZE": "1"} if small_buckets else None
    for message in run_ranks(2, _errors, "with_bagua", where, env=env, reuse=True):
        assert (message is None) == (where == "forward")
        assert message is None or ("first.weight" in message and "ended with an exception" in message)
