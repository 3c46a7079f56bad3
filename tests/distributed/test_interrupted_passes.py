"""What is said after a pass that ended with an exception. Training that goes on: test_step_programs.py."""

from __future__ import annotations

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import (
    batches,
    check_ranks_equal,
    message_of,
)
from torch import Tensor, nn

from bagua.torch_api.data_parallel import DistributedDataParallel


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Stumbling(nn.Module):
    """Gives a loss. Raises in backward where told to: before any gradient is made, in the middle, or after all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, where: str = "") -> Tensor:
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
