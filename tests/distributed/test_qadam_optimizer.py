"""QAdam's optimizer without communication: Adam while it warms up, the formula with a frozen variance after that."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import (
    ConvNet,
    Scaled,
    batches,
    begin,
    check_equal,
    loss_of,
    message_of,
    mlp,
    step_lengths,
    three_groups,
)
from torch import Tensor, nn

from bagua.torch_api.algorithms import q_adam_optimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

W = 4


def _losses(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], set_to_none: bool = True) -> list[float]:
    losses = []
    for batch in data:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(net, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("foreach", "bytes_at_a_time"), rest_is_deep([(True, 1 << 20), (False, 1 << 20), (True, 100), (True, 1)], 2)
)
@on_ranks(1, fresh=True)
def test_hundreds_of_steps_of_warm_up_are_those_of_adam(
    device: torch.device, foreach: bool, bytes_at_a_time: int
) -> None:
    q_adam_optimizer._BYTES_AT_A_TIME = bytes_at_a_time
    ours, theirs = mlp(0, device), mlp(0, device)
    data = batches(0, 300, device)
    optimizer = QAdamOptimizer(ours.parameters(), lr=1e-3, warmup_steps=2000, weight_decay=0.1)
    adam = torch.optim.Adam(theirs.parameters(), lr=1e-3, weight_decay=0.1, foreach=foreach)
    assert _losses(ours, optimizer, data) == _losses(theirs, adam, data)
    check_equal(ours, theirs)


def _most_in_a_step() -> int:
    """Bytes that a step took for a while, beside 64 parameters of 256 KiB."""
    begin()
    net = nn.ParameterList(torch.ones(1 << 16) for _ in range(64))
    optimizer = QAdamOptimizer(net.parameters(), warmup_steps=1)
    for parameter in net:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step()
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.skipif(os.environ.get("BAGUA_TEST_DEVICE") == "cuda", reason="on GPUs all are updated at once")
def test_on_a_cpu_a_step_takes_memory_for_a_part_of_the_parameters() -> None:
    (most,) = run_ranks(1, _most_in_a_step)
    assert 1 << 18 <= most <= 5 << 18


class Wide(nn.Module):
    """Layers of float32, float64 and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 8)
        self.second = nn.Linear(8, 8, dtype=torch.float64)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.third = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(x)).double()).float()
        return self.third((x * self.turn).real)


@on_ranks(1)
def test_unusual_parameters_follow_adam(device: torch.device) -> None:
    """Layouts, dtypes, options by group, and gradients that are zeroed in place; to the last step of warm-up."""
    for make, shape in ((ConvNet, (2, 3, 8, 8)), (Scaled, (4, 2)), (Wide, (4, 2))):
        torch.manual_seed(1)
        ours = make().to(device)
        if make is ConvNet:
            ours = ours.to(memory_format=torch.channels_last)
        theirs = copy.deepcopy(ours)
        optimizer, adam = QAdamOptimizer(three_groups(ours), warmup_steps=20), torch.optim.Adam(three_groups(theirs))
        data = batches(0, 20, device, shape)
        for set_to_none, part in ((True, data[:10]), (False, data[10:])):
            assert _losses(ours, optimizer, part, set_to_none) == _losses(theirs, adam, part, set_to_none)
            check_equal(ours, theirs, make.__name__)


# --- the formula, with numbers of one tensor -------------------------------------------------------------------------


class _Formula:
    """One parameter, as the head of bagua.torch_api.algorithms.q_adam says it."""

    def __init__(self, p: Tensor, lr: float, betas: tuple[float, float], wd: float, freeze: bool = True) -> None:
        self.p, self.lr, self.betas, self.wd, self.freeze = p.clone(), lr, betas, wd, freeze
        self.state_dtype = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
        self.m = torch.zeros_like(p, dtype=self.state_dtype)
        self.v = self.m.clone()
        self.t = 0

    def step(self, gradient: Tensor) -> None:
        self.t += 1
        (b1, b2), p = self.betas, self.p.to(self.state_dtype)
        g = gradient.to(self.state_dtype) + self.wd * p
        self.m = b1 * self.m + (1 - b1) * g
        if self.t <= W:
            self.v = b2 * self.v + (1 - b2) * g**2
        if self.t == W:
            self.v[self.v == 0] = self.v[self.v != 0].mean()
        learned = min(self.t, W) if self.freeze else self.t
        update = self.m / (self.v.sqrt() / (1 - b2**learned) ** 0.5 + 1e-8)
        self.p = (p - self.lr / (1 - b1**self.t) * update).to(self.p.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@on_ranks(1)
def test_steps_follow_the_formula_before_and_after_warm_up(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((3, 5), (7,))]
    parameters = [nn.Parameter(one.clone()) for one in starts]
    options: list[dict[str, Any]] = [
        {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1},
        {"lr": 0.03, "betas": (0.5, 0.9), "weight_decay": 0.0, "freeze_bias_correction": False},
    ]
    optimizer = QAdamOptimizer(
        [{"params": [one], **option} for one, option in zip(parameters, options, strict=True)], warmup_steps=W
    )
    formulas = [
        _Formula(one, option["lr"], option["betas"], option["weight_decay"], option.get("freeze_bias_correction", True))
        for one, option in zip(starts, options, strict=True)
    ]
    for _ in range(3 * W):
        for parameter, formula in zip(parameters, formulas, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
            formula.step(parameter.grad)
        optimizer.step()
        for parameter, formula in zip(parameters, formulas, strict=True):
            tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps)
            torch.testing.assert_close(parameter.detach(), formula.p, rtol=tolerance, atol=tolerance)
            state = optimizer.state[parameter]
            assert state["step"] == formula.t
            assert state["exp_avg"].dtype == formula.state_dtype
            torch.testing.assert_close(state["exp_avg_sq"], formula.v)


def test_steps_do_not_grow_after_warm_up() -> None:
    """With the gradient always the same, each step of Adam is `lr` long."""
    frozen, grown = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))
    optimizer = QAdamOptimizer([frozen], lr=0.5, warmup_steps=W, eps=0)
    assert step_lengths(optimizer, frozen, 50 * W) == pytest.approx([0.5] * 50 * W)
    optimizer = QAdamOptimizer([grown], lr=0.5, warmup_steps=W, eps=0, freeze_bias_correction=False)
    growth = [((1 - 0.999 ** max(t, W)) / (1 - 0.999**W)) ** 0.5 for t in range(1, 50 * W + 1)]
    assert step_lengths(optimizer, grown, 50 * W) == pytest.approx([0.5 * one for one in growth])
    assert growth[-1] > 6


@on_ranks(1)
def test_small_and_absent_gradients_in_float16(device: torch.device) -> None:
    """In float16 eps is zero: state of the parameter's own dtype would give 0 / 0."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float16, device=device))
    optimizer = QAdamOptimizer([parameter], lr=0.1, warmup_steps=W)
    for _ in range(2 * W):
        parameter.grad = torch.tensor([0.0, 1e-5, 1.0], dtype=torch.float16, device=device)
        optimizer.step()
    assert parameter[0] == 1
    torch.testing.assert_close(
        parameter[1:].detach().float(), torch.tensor([0.2, 0.2], device=device), atol=0.3, rtol=0
    )


def _unseen(seen_rows: int) -> float:
    """Row 0 of a table gets its first gradient after warm-up. Returns how far it moves in one step."""
    _, device = begin()
    table = nn.Embedding(4, 3).to(device)
    before = table.weight.detach().clone()
    optimizer = QAdamOptimizer(table.parameters(), lr=0.1, warmup_steps=W)
    for _ in range(W):
        optimizer.zero_grad()
        table(torch.arange(4 - seen_rows, 4, device=device)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    table(torch.zeros(1, dtype=torch.long, device=device)).sum().backward()
    optimizer.step()
    return (table.weight[0] - before[0]).abs().max().item()


def test_rows_that_were_not_seen_while_warming_up_move_as_others_do() -> None:
    (moved,) = run_ranks(1, _unseen, 2, reuse=True)
    assert 0 < moved < 0.1


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"warmup_steps": 0},
        {"warmup_steps": 2.5},
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    (name,) = options
    parameter = nn.Parameter(torch.ones(1))
    for make in (
        lambda: QAdamOptimizer([parameter], **options),
        lambda: QAdamOptimizer([{"params": [parameter], **options}]),
        lambda: QAdamOptimizer([nn.Parameter(torch.ones(1))]).add_param_group({"params": [parameter], **options}),
    ):
        assert name in message_of(ValueError, make)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = QAdamOptimizer(table.parameters())
    table(torch.tensor([1])).sum().backward()
    assert "sparse=False" in message_of(RuntimeError, optimizer.step)


def test_a_closure() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = QAdamOptimizer([parameter], lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.9))
