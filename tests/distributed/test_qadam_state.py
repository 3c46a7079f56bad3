"""Saved state of QAdam's optimizer: it goes on bit for bit, also that of before an option, and that of Adam."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import batches, check_equal, mlp, step_lengths, three_groups, train
from torch import Tensor, nn

from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

W = 4


class Half(nn.Module):
    """Two layers, the second of bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 8), nn.Linear(8, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)).bfloat16()).float()


@pytest.mark.parametrize("how", ["state_dict", "copy", "pickle"])
@pytest.mark.parametrize("at", [1, W - 1, W, W + 2])
@on_ranks(1)
def test_state_goes_on_bit_for_bit(device: torch.device, how: str, at: int) -> None:
    torch.manual_seed(0)
    net: nn.Module = Half().to(device)
    data = batches(0, at + 3, device)
    optimizer = QAdamOptimizer(three_groups(net), warmup_steps=W)
    train(net, optimizer, data[:at])
    if how == "copy":
        other, loaded = copy.deepcopy((net, optimizer))
    elif how == "pickle":
        other, loaded = pickle.loads(pickle.dumps((net, optimizer)))
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(net)
        loaded = QAdamOptimizer(three_groups(other), warmup_steps=3 * W)  # the saved one wins, as with lr
        loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.warmup_steps == W
    train(net, optimizer, data[at:])
    train(other, loaded, data[at:])
    check_equal(other, net, f"{how} at {at}")


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@on_ranks(1)
def test_state_from_before_the_option_goes_on_bit_for_bit(device: torch.device, how: str) -> None:
    """State without the option, saved when its only behaviour was False."""
    for at in (1, W, W + 2):
        torch.manual_seed(0)
        net: nn.Module = Half().to(device)
        data = batches(0, at + 2 * W, device)
        optimizer = QAdamOptimizer(three_groups(net), warmup_steps=W, freeze_bias_correction=False)
        train(net, optimizer, data[:at])
        other, old = copy.deepcopy((net, optimizer))
        for options in (old.defaults, *old.param_groups):
            del options["freeze_bias_correction"]
        if how == "state_dict":
            loaded = QAdamOptimizer(three_groups(other), warmup_steps=W)
            loaded.load_state_dict(old.state_dict())
        else:
            other, loaded = pickle.loads(pickle.dumps((other, old)))
        assert [group["freeze_bias_correction"] for group in loaded.param_groups] == [False] * 3
        train(net, optimizer, data[at:])
        train(other, loaded, data[at:])
        check_equal(other, net, f"{how} at {at}")
        # A group that is added has what the optimizer was made with, as it has of all options.
        loaded.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert loaded.param_groups[3]["freeze_bias_correction"] is (how == "state_dict")


def test_the_saved_option_wins() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    saved = QAdamOptimizer([{"params": [parameters[0]], "freeze_bias_correction": False}, {"params": [parameters[1]]}])
    for made_with in (True, False):
        loaded = QAdamOptimizer([{"params": [one]} for one in parameters], freeze_bias_correction=made_with)
        loaded.load_state_dict(saved.state_dict())
        assert [group["freeze_bias_correction"] for group in loaded.param_groups] == [False, True]


@on_ranks(1)
def test_the_state_of_adam_is_taken_over(device: torch.device) -> None:
    net = mlp(0, device)
    data = batches(0, 2 * W, device)
    adam = torch.optim.Adam(net.parameters(), weight_decay=0.1)
    train(net, adam, data[:2])
    other = mlp(1, device)
    other.load_state_dict(net.state_dict())
    optimizer = QAdamOptimizer(other.parameters(), warmup_steps=W)
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert optimizer.warmup_steps == W
    train(net, adam, data[2:W])
    train(other, optimizer, data[2:W])
    check_equal(other, net)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_run_of_adam_that_was_longer_than_the_warm_up(freeze: bool) -> None:
    """Its variance is of all its steps, and so is the correction: the first steps of QAdam are as long as the last of
    Adam. What had no gradient until then moves as the others do."""
    parameter = nn.Parameter(torch.zeros((), dtype=torch.float64))
    adam = torch.optim.Adam([parameter], lr=0.5, eps=0)
    step_lengths(adam, parameter, 30 * W)
    optimizer = QAdamOptimizer([parameter], warmup_steps=W, freeze_bias_correction=freeze)
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    (group,) = optimizer.param_groups
    assert (group["warmup_steps"], group["freeze_bias_correction"]) == (30 * W, freeze)
    assert optimizer.warm_parameters() == {id(parameter)}
    (first, *_, last) = step_lengths(optimizer, parameter, 30 * W)
    assert first == pytest.approx(0.5, rel=0.01)
    assert (last == pytest.approx(0.5)) is freeze


def test_elements_that_adam_never_saw() -> None:
    """They move as the others do, and the state that was given stays as it is."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
        adam = torch.optim.Adam([parameter], lr=0.5)
        parameter.grad = torch.tensor([0, 1, 1, 1], dtype=dtype)
        for _ in range(W):
            adam.step()
        saved = adam.state_dict()
        variance = saved["state"][0]["exp_avg_sq"].clone()
        optimizer = QAdamOptimizer([parameter], lr=0.5, warmup_steps=W)
        optimizer.load_state_dict(saved)
        assert torch.equal(saved["state"][0]["exp_avg_sq"], variance)
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
        assert 0 < parameter.detach()[0].abs() < 0.5, dtype
