"""Synchronized batch normalization in one process: conversion, and training without a process group."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bagua.torch_api.contrib import SyncBatchNorm


class _Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return torch.relu(super().forward(input))


def test_conversion_keeps_parameters_buffers_hooks_and_mode() -> None:
    shared = nn.BatchNorm2d(3)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 3, 1), shared), shared, nn.BatchNorm3d(3, affine=False), nn.SyncBatchNorm(3)
    )
    called = []
    shared.register_forward_hook(lambda *_: called.append(1))
    shared.weight.requires_grad_(False)
    shared.eval()
    state = {name: value.data_ptr() for name, value in net.state_dict(keep_vars=True).items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    assert SyncBatchNorm.convert_sync_batchnorm(net) is net
    assert {name: value.data_ptr() for name, value in net.state_dict(keep_vars=True).items()} == state
    assert all(one is other for one, other in zip(net.parameters(), optimizer.param_groups[0]["params"], strict=True))
    assert all(isinstance(one, SyncBatchNorm) for one in (net[0][1], *net[1:]))
    assert net[1] is net[0][1], "a layer that was shared is not any more"
    assert not net[1].training
    assert net[2].training
    net[1](torch.randn(2, 3, 4, 4))
    assert called
    assert type(shared) is nn.BatchNorm2d, "the caller's layer was changed"


def test_a_layer_is_converted_itself_and_other_modules_are_left_alone() -> None:
    converted = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4, momentum=None))
    assert isinstance(converted, SyncBatchNorm)
    assert converted.momentum is None
    linear = nn.Linear(2, 2)
    assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (lambda: _Activated(3), "1.0 is a _Activated, which has a forward of its own"),
        (nn.LazyBatchNorm2d, "1.0 is a LazyBatchNorm2d, which does not know its channels yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_layers_that_cannot_be_converted_are_named_and_nothing_is(layer: Callable[[], nn.Module], told: str) -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(layer()))
    with pytest.raises(ValueError, match=told):
        SyncBatchNorm.convert_sync_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm2d


def test_without_a_process_group_it_is_torchs_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=None)
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    for _ in range(2):
        data = torch.randn(2, 3, 4, 4)
        torch.testing.assert_close(ours(data), plain(data), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "data", [torch.zeros(3), torch.zeros(2, 4, 3), torch.zeros(2, 3, dtype=torch.int64)], ids=["1d", "channels", "int"]
)
def test_inputs_that_it_cannot_take(data: Tensor) -> None:
    with pytest.raises(ValueError, match=r"SyncBatchNorm\(3\) got an input of shape"):
        SyncBatchNorm(3)(data)


def test_a_group_that_is_none() -> None:
    with pytest.raises(TypeError, match="process_group is 'world'"):
        SyncBatchNorm(3, process_group="world")(torch.zeros(2, 3))  # type: ignore[arg-type]
