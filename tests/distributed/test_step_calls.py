"""What a step of the default algorithm adds to that of the bare module: counted in calls of Python functions, because a
time would depend on the machine. It is most of what small models lose against torch's wrapper."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from support.rank_tests import on_ranks
from support.regrouped import run_job, start
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.data_parallel import DistributedDataParallel

PACKAGE = bagua.__file__.removesuffix("torch_api/__init__.py")
# A step in eight is sampled, and calls more.
STEPS = 4
FEW, MANY = 2, 10
MOST = {"with_bagua": 60, "wrapper": 70}
MOST_UNDER_REGROUP = {"with_bagua": 78, "wrapper": 93}
MOST_PER_PARAMETER = 2  # the hook, and what sets the ready flag


class Product(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x.sum()


def calls_in_a_step(how: str, parameters: int, device: torch.device) -> int:
    """Of functions of Bagua, in one that is not sampled."""
    bare = Product(parameters).to(device)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    if how == "with_bagua":
        model: Any = bagua.with_bagua(bare, [optimizer])
    else:
        model = DistributedDataParallel(bare, optimizers=[optimizer])
    counted: list[int] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counted[-1] += 1

    for _ in range(STEPS):
        counted.append(0)
        sys.setprofile(note)
        try:
            model(torch.ones(4, device=device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    bare.bagua_ddp.detach()  # type: ignore[operator]  # it would look at the steps of the next one
    return min(counted)


@on_ranks(1)
def test_a_rank_alone_sends_nothing(device: torch.device) -> None:
    model, bare = Product(FEW).to(device), Product(FEW).to(device)
    wrapped = bagua.with_bagua(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    x = torch.arange(4.0, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        wrapped(x).backward()
    bare(x).backward()
    for mine, other in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]
    assert not [event.key for event in profile.key_averages() if "allreduce" in event.key.replace("_", "")]


@on_ranks(2)
def test_a_step_calls_little(device: torch.device) -> None:
    for how, most in MOST.items():
        few, many = (calls_in_a_step(how, parameters, device) for parameters in (FEW, MANY))
        assert few <= most, how
        assert many - few <= MOST_PER_PARAMETER * (MANY - FEW), how


def _calls_under_regroup() -> dict[str, int]:
    start()
    return {how: calls_in_a_step(how, FEW, torch.get_default_device()) for how in MOST_UNDER_REGROUP}


def test_a_step_under_regroup_calls_little() -> None:
    for calls in run_job(2, _calls_under_regroup):
        assert all(calls[how] <= most for how, most in MOST_UNDER_REGROUP.items()), calls
