"""fuse_step() fuses where that takes less time, and is the optimizer's own step() where it does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch, whose optimizers are fused")
import torch
from support.tool_module import load_script
from torch import nn, optim

from bagua.contrib.fuse import optimizer as fused_module
from bagua.contrib.fuse.layout import break_even
from bagua.contrib.fuse.optimizer import fuse_optimizer, fused_parameters


def made(sizes: list[int], cls: Any = optim.AdamW, **options: Any) -> tuple[list[nn.Parameter], Any, list[int]]:
    """Parameters, their fused optimizer, and where they were before."""
    parameters = [nn.Parameter(torch.randn(size)) for size in sizes]
    before = [one.data_ptr() for one in parameters]
    return parameters, fuse_optimizer(cls(parameters, lr=0.1, **options)), before


def give_gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    for number, one in enumerate(parameters):
        one.grad = torch.full_like(one, number + 1.0)
    return [one.grad for one in parameters if one.grad is not None]


@pytest.mark.parametrize(
    ("count", "elements", "cls", "options", "is_fused"),
    [
        (40, 256, optim.AdamW, {}, True),
        (40, 256, optim.AdamW, {"foreach": True}, True),
        (40, 256, optim.AdamW, {"fused": True}, True),
        (5, 256, optim.AdamW, {"fused": True}, False),
        (40, 256, optim.SGD, {}, True),
        (40, 256, optim.SGD, {"fused": True}, False),
        (40, 256, optim.SGD, {"momentum": 0.9}, True),
        (2, 6, optim.SGD, {"momentum": 0.9}, True),  # as Bagua 0.9 counts it
        (20, 1 << 16, optim.AdamW, {}, False),
        (20, 1 << 16, optim.AdamW, {"foreach": True}, False),
        (20, 1 << 16, optim.AdamW, {"fused": True}, False),
        (20, 1 << 16, optim.SGD, {"momentum": 0.9}, False),
        (20, 1 << 16, optim.RMSprop, {}, False),
    ],
)
def test_where_it_pays(count: int, elements: int, cls: Any, options: dict[str, Any], is_fused: bool) -> None:
    parameters, optimizer, before = made([elements] * count, cls, **options)
    for _ in range(3):
        gradients = give_gradients(parameters)
        optimizer.fuse_step()
    assert optimizer._bagua_fused_count == 3 * is_fused
    assert fused_parameters(optimizer) == parameters * is_fused
    if not is_fused:  # nothing was moved
        assert [one.data_ptr() for one in parameters] == before
        assert all(one.grad is gradient for one, gradient in zip(parameters, gradients, strict=True))
        states = [optimizer.state[one].get("exp_avg") for one in parameters]
        assert len({one.untyped_storage().data_ptr() for one in states if one is not None}) in (0, count)


def test_large_ones_among_small_ones_stay_where_they_are() -> None:
    sizes = [256] * 20 + [1 << 16] + [256] * 20 + [1 << 16]
    parameters, optimizer, before = made(sizes)
    others = [nn.Parameter(one.detach().clone()) for one in parameters]
    other = optim.AdamW(others, lr=0.1)
    for _ in range(3):
        give_gradients(parameters)
        give_gradients(others)
        optimizer.fuse_step()
        other.step()
    small = [one for one in parameters if one.numel() == 256]
    assert sorted(map(id, fused_parameters(optimizer))) == sorted(map(id, small))
    assert [parameters[position].data_ptr() for position in (20, 41)] == [before[position] for position in (20, 41)]
    assert all(map(torch.equal, parameters, others))


def test_runs_are_cut_and_have_the_same_states() -> None:
    parameters, optimizer, _ = made([4000] * 80)
    others = [nn.Parameter(one.detach().clone()) for one in parameters]
    other = optim.AdamW(others, lr=0.1)
    limit = break_even(optimizer, optimizer.param_groups[0]).run_elements
    assert 2 * limit < 80 * 4000
    for _ in range(3):
        give_gradients(parameters)
        give_gradients(others)
        optimizer.fuse_step()
        other.step()
    assert fused_parameters(optimizer) == parameters
    assert all(map(torch.equal, parameters, others))
    states = optimizer.state_dict()["state"]
    for key, state in other.state_dict()["state"].items():
        assert all(torch.equal(states[key][name], value) for name, value in state.items())


def test_what_is_not_fused_is_the_optimizers_own_step() -> None:
    """With its scheduler, its closure, a scaler and a copy; and small parameters that are added later are fused."""
    parameters, optimizer, _ = made([1 << 16] * 3, optim.SGD)
    calls = []
    step = optimizer.step
    optimizer.step = lambda *given: calls.append(given) or step(*given)
    for _ in range(20):
        give_gradients(parameters)
        optimizer.fuse_step()
    assert len(calls) > 10
    calls.clear()

    def closure() -> float:
        give_gradients(parameters)
        return 0.5

    while not calls:
        assert optimizer.fuse_step(closure) == 0.5
    assert calls == [(closure,)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(3):
        scaler.scale(sum(one.sum() for one in parameters)).backward()
        optimizer.fuse_step(scaler=scaler)
        scaler.update()
    del optimizer.step
    twin = copy.deepcopy(optimizer)
    twin.fuse_step()
    small = [nn.Parameter(torch.randn(256)) for _ in range(40)]
    optimizer.add_param_group({"params": small})
    give_gradients([*parameters, *small])
    optimizer.fuse_step()
    assert fused_parameters(optimizer) == small


def test_gradients_that_are_others_in_each_step_are_not_planned_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is for the parameters that have gradients."""
    parameters, optimizer, _ = made([256] * 40)
    others = [nn.Parameter(one.detach().clone()) for one in parameters]
    other = optim.AdamW(others, lr=0.1)
    plans: list[object] = []
    plan = fused_module.Plan
    monkeypatch.setattr(fused_module, "Plan", lambda *given: plans.append(given) or plan(*given))
    for step in range(120):
        for tensors in (parameters, others):
            give_gradients(tensors)
            if step < 80:
                tensors[step % 40].grad = None
        optimizer.fuse_step()
        other.step()
    assert len(plans) < 20
    assert len(fused_parameters(optimizer)) == 40
    assert all(map(torch.equal, parameters, others))


def test_the_example_has_the_same_losses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fuse_optimizer.py", "--layers", "3", "--steps", "3"])
    load_script("examples/fuse_optimizer.py").main()
    assert "with fuse_step the same" in capsys.readouterr().out
