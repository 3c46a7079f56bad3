"""Synchronized batch normalization: conversion, and ranks with a part of the batch each beside one process with all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import algorithm_of, check_close, check_tensor_on_ranks, counted_all_reduces, message_of, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bagua.contrib.sync_batchnorm import SyncBatchNorm
from bagua.job.failure_report import CollectiveError
from bagua.job.torch_internals import default_store
from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.communication import new_group

CHANNELS = 8
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@dataclass(frozen=True)
class Case:
    """`sizes`: the batch of each of three ranks; `shape`: of a sample behind the channels."""

    shape: tuple[int, ...]
    sizes: tuple[int, ...] = (4, 4, 4)
    layout: torch.memory_format = torch.contiguous_format
    dtype: torch.dtype = torch.float32
    layer_dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    mean: float = 0.5
    tolerance: float = 2e-5


LAST, LAST_3D = torch.channels_last, torch.channels_last_3d
CASES = {
    "upstream's": Case((16, 16), (32, 32, 32)),
    "vectors": Case(()),
    "sequences": Case((5,)),
    "volumes": Case((3, 2, 4)),
    "channels last": Case((6, 5), layout=LAST),
    "channels last volumes": Case((3, 2, 4), layout=LAST_3D),
    "uneven": Case((6, 5), (1, 7, 2)),
    "nothing on the first rank": Case((6, 5), (0, 3, 2)),
    "nothing on the last ranks": Case((6, 5), (3, 0, 0), layout=LAST),
    "one value on each rank": Case((), (1, 1, 1)),
    "cumulative average": Case((3,), options={"momentum": None}),
    "no running statistics": Case((3,), options={"track_running_stats": False}),
    "no parameters": Case((6, 5), options={"affine": False}),
    "far from zero": Case((6, 5), mean=300.0, tolerance=1e-3),
    "double": Case((3,), (2, 0, 5), dtype=torch.float64, layer_dtype=torch.float64, tolerance=1e-12),
    "half": Case((6, 5), dtype=torch.float16, tolerance=4e-3),
    "half layer": Case((6, 5), (3, 0, 4), dtype=torch.float16, layer_dtype=torch.float16, tolerance=4e-3),
    "bfloat16": Case((6, 5), dtype=torch.bfloat16, layout=LAST, tolerance=3e-2),
    "bfloat16 layer": Case((), dtype=torch.bfloat16, layer_dtype=torch.bfloat16, tolerance=3e-2),
}


def _layer_pair(case: Case, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Ours, and the reference for the whole batch in at least float32."""
    torch.manual_seed(5)
    plain = NORMS[len(case.shape) + 2](CHANNELS, **case.options).to(device, case.layer_dtype)
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    reference = copy.deepcopy(plain).to(torch.promote_types(case.layer_dtype, torch.float32))
    return SyncBatchNorm.convert_sync_batchnorm(plain), reference


def _close(ours: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    ours, expected = ours.detach().to(expected.dtype), expected.detach()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(
        ours, expected, rtol=tolerance, atol=tolerance * scale, msg=lambda told: f"{what}: {told}"
    )


def _check_case(name: str, case: Case, rank: int, device: torch.device) -> None:
    ours, reference = _layer_pair(case, device)
    generator = torch.Generator().manual_seed(9)
    for step in range(2):
        shape = (sum(case.sizes), CHANNELS, *case.shape)
        data, dy = (torch.randn(shape, generator=generator).to(device, case.dtype) for _ in range(2))
        data = data * torch.linspace(0.5, 2, CHANNELS, device=device).to(case.dtype).view(-1, *[1] * len(case.shape))
        data += case.mean
        whole = data.to(torch.promote_types(case.dtype, torch.float32), copy=True).requires_grad_()
        expected = reference(whole)
        reference.zero_grad()
        expected.backward(dy.to(expected.dtype))

        part = data.split(case.sizes)[rank].clone(memory_format=torch.preserve_format)
        part = part.contiguous(memory_format=case.layout).requires_grad_()
        output = ours(part)
        ours.zero_grad()
        output.backward(dy.split(case.sizes)[rank])

        what, tolerance = f"{name}, step {step}", case.tolerance
        assert (output.shape, output.dtype) == (part.shape, case.dtype), what
        assert output.is_contiguous(memory_format=case.layout), what
        _close(output, expected.split(case.sizes)[rank], tolerance, f"{what}: output")
        _close(part.grad, whole.grad.split(case.sizes)[rank], tolerance, f"{what}: gradient of the input")
        for key, parameter in ours.named_parameters():
            gradient = parameter.grad.to(torch.float64)
            dist.all_reduce(gradient)
            _close(gradient, reference.get_parameter(key).grad.double(), tolerance, f"{what}: gradient of {key}")
        for key, buffer in ours.named_buffers():
            _close(buffer, reference.get_buffer(key), tolerance, f"{what}: {key}")
            check_tensor_on_ranks(buffer, f"{what}: {key}")


@on_ranks(3)
def test_ranks_compute_what_one_large_batch_does(rank: int, device: torch.device) -> None:
    names = list(CASES)
    for name in names:
        _check_case(name, CASES[name], rank, device)


# --- training --------------------------------------------------------------------------------------------------------


class _ConvNet(nn.Module):
    """Layers in a chain and in branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6))
        self.right = nn.Sequential(nn.Conv2d(8, 6, 3, bias=False), nn.BatchNorm2d(6, momentum=None))
        self.head = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(torch.relu(self.left(x) + self.right(x)).mean(dim=(2, 3)))


class _MeanImpl(AlgorithmImpl):
    """The mean of the gradients, by a collective of the group that torch knows, on another thread on CPUs."""

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        def average(_: str) -> None:
            flat = bucket.flattened_tensor()
            dist.all_reduce(flat, group=self.process_group.torch_group)
            flat.div_(self.process_group.size)

        bucket.append_python_op(average)


@pytest.mark.parametrize(
    ("ranks", "how"), [(2, "with_bagua"), (2, "wrapper"), (2, "an operation of users"), (3, "with_bagua")]
)
@on_ranks(env={"BAGUA_DEFAULT_BUCKET_SIZE": "1"})
def test_data_parallel_training_is_that_of_one_process(rank: int, device: torch.device, ranks: int, how: str) -> None:
    # Buckets of a tensor each: gradients are communicated while the layers communicate in backward.
    ranks, size = dist.get_world_size(), 4
    torch.manual_seed(3)
    alone = _ConvNet().to(device).double()  # in float32, GPUs may convolve in less
    ours: Any = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    assert sum(isinstance(layer, SyncBatchNorm) for layer in ours.modules()) == 4
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9) for net in (ours, alone)]
    if how == "an operation of users":
        model = ours.with_bagua([optimizers[0]], algorithm_of(_MeanImpl))
    else:
        model = wrap(how, ours, optimizers[0])
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ranks * size, 3, 10, 9, generator=generator, dtype=torch.float64).to(device)
        y = torch.randn(ranks * size, 4, generator=generator, dtype=torch.float64).to(device)
        for net, optimizer in ((model, optimizers[0]), (alone, optimizers[1])):
            mine = slice(rank * size, (rank + 1) * size) if net is model else slice(None)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[mine]), y[mine]).backward()
            optimizer.step()
    check_close(ours, alone, f"{how}, {ranks} ranks", tolerance=1e-9)
    ours.eval()
    alone.eval()
    torch.testing.assert_close(ours(x), alone(x), rtol=1e-8, atol=1e-8)


# --- groups, and what is not communicated ----------------------------------------------------------------------------


@on_ranks(3)
def test_groups(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    data = torch.randn(3, 4, CHANNELS, device=device)
    bagua_group, torch_group = new_group([0, 2]), dist.new_group([0, 2])
    for group in (bagua_group, torch_group, None):
        layer = SyncBatchNorm(CHANNELS, process_group=group).to(device)
        members = [0, 1, 2] if group is None else [0, 2]
        if rank in members:
            expected = nn.BatchNorm1d(CHANNELS).to(device)(data[members].flatten(0, 1)).view(len(members), 4, -1)
            torch.testing.assert_close(layer(data[rank]), expected[members.index(rank)])
            copied = copy.deepcopy(layer)
            assert copied.process_group is group
            torch.testing.assert_close(copied(data[rank]), expected[members.index(rank)])
        elif group is bagua_group:
            assert "rank 1, which is not in its process group" in message_of(RuntimeError, lambda: layer(data[1]))  # noqa: B023
    dist.barrier()


@on_ranks(3)
def test_evaluation_and_inputs_without_gradient_do_not_communicate(rank: int, device: torch.device) -> None:
    torch.manual_seed(rank)
    data = torch.randn(4, CHANNELS, 3, device=device)
    layer = SyncBatchNorm(CHANNELS).to(device)
    with counted_all_reduces() as calls:
        layer(data).sum().backward()  # the input needs no gradient
        assert not calls
        layer(data.clone().requires_grad_()).sum().backward()
        assert calls == [2 * CHANNELS]
    untracked = SyncBatchNorm(CHANNELS, track_running_stats=False).to(device)
    group_of_one = [new_group([one]) for one in range(dist.get_world_size())][rank]
    if rank == 1:  # alone: it would wait for the others
        plain = nn.BatchNorm1d(CHANNELS).to(device)
        plain.load_state_dict(layer.state_dict())
        torch.testing.assert_close(layer.eval()(data), plain.eval()(data))
        torch.testing.assert_close(untracked.eval()(data), nn.functional.batch_norm(data, None, None, training=True))
        single = SyncBatchNorm(CHANNELS, process_group=group_of_one).to(device)
        torch.testing.assert_close(single(data), nn.BatchNorm1d(CHANNELS).to(device)(data))
    dist.barrier()


@on_ranks(3)
def test_compiled_checkpointed_and_in_autocast(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2)).to(device)
    data = torch.randn(3, 6, 4, device=device)
    expected = alone(data.flatten(0, 1)).view(3, 6, 2)
    expected.square().sum().backward()
    for how in ("compiled", "checkpointed", "autocast"):
        ours: Any = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
        ours.zero_grad()
        if how == "compiled":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler's own, where a graph ends
                output = torch.compile(ours, backend="eager")(data[rank])
        elif how == "checkpointed":
            output = checkpoint(ours, data[rank], use_reentrant=False)
        else:
            with torch.autocast(device.type, torch.bfloat16):
                output = ours(data[rank])
            assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
        gradient = ours[0].weight.grad
        dist.all_reduce(gradient)
        tolerance = 0.1 if how == "autocast" else 1e-4
        _close(output, expected[rank], tolerance, how)
        _close(gradient, alone[0].weight.grad, tolerance, how)


@on_ranks(3)
def test_what_is_refused(rank: int, device: torch.device) -> None:
    layer = SyncBatchNorm(CHANNELS).to(device)
    before = copy.deepcopy(layer.state_dict())
    small = torch.zeros(1 if rank == 1 else 0, CHANNELS, device=device)
    message = message_of(ValueError, lambda: layer(small))
    assert message.startswith("SyncBatchNorm(8) got 1 values per channel from all ranks together"), message
    assert torch.equal(layer.running_var, before["running_var"])

    x = torch.randn(3, CHANNELS, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    assert "differentiate twice" in message_of(RuntimeError, lambda: gradient.sum().backward())


def _lose_one(where: str) -> tuple[str, tuple[int, ...]]:
    rank, device = begin_to_lose_one()
    layer = SyncBatchNorm(CHANNELS).to(device)
    x = torch.randn(4, CHANNELS, device=device, requires_grad=True)
    layer(x).sum().backward()
    try:
        if rank == VICTIM and where == "forward":
            die()
        output = layer(x)
        if rank == VICTIM:
            default_store().wait(["forward is over"])  # the survivor may not have read yet what we sent
            die()
        default_store().set("forward is over", b"")
        output.sum().backward()
        x.grad.sum().item()
    except CollectiveError as error:
        return str(error), error.missing_ranks
    raise AssertionError("normalized without the rank that died")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_survivors_name_the_rank_that_died(where: str) -> None:
    told = run_ranks(2, _lose_one, where, env={"TORCH_NCCL_BLOCKING_WAIT": "1"}, expect_death={VICTIM})
    message, missing = told[0]
    assert missing == (VICTIM,), message
    assert f"{where} of SyncBatchNorm(8)" in message


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
