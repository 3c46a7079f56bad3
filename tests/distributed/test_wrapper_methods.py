"""Methods and names of torch's DistributedDataParallel that change what the wrapper communicates, and when.

torch's own tests of them run with this wrapper in judges/test_torch_ddp.py, without a word on what they mean here.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.training import (
    NormNet,
    batches,
    check_close,
    check_equal,
    check_ranks_equal,
    loss_of,
    message_of,
    mlp,
    train,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _BufferCommHookLocation

from bagua.torch_api.data_parallel import DistributedDataParallel

LR = 0.05


def _step_in_backward(module: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch runs when this is imported
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": LR})


def _plain_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR)


def _reference(rank: int, device: torch.device, make: Any = mlp) -> Any:
    """Trained in three steps by the optimizer that the tests replace; starts like `mlp(rank, device)`."""
    reference = DistributedDataParallel(make(rank, device))
    train(reference, _plain_sgd(reference), batches(rank, 3, device))
    return reference


# --- optimizers that step in the backward pass -----------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False], ids=["before wrapping", "after wrapping"])
@on_ranks(2)
def test_an_optimizer_in_backward_steps_with_the_mean_gradient(rank: int, device: torch.device, is_first: bool) -> None:
    net = mlp(rank, device)
    if is_first:
        _step_in_backward(net)
    model: Any = DistributedDataParallel(net)
    if not is_first:
        _step_in_backward(net)
    for batch in batches(rank, 3, device):
        loss_of(model, batch).backward()
        assert all(parameter.grad is None for parameter in net.parameters()), "dropped, as torch does"
    check_equal(model, _reference(rank, device))
    check_ranks_equal(model)


@on_ranks(2)
def test_an_optimizer_in_backward_needs_an_algorithm_that_averages_gradients(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    model: Any = DistributedDataParallel(net, algorithm="decentralized")
    _step_in_backward(net)
    text = message_of(NotImplementedError, lambda: model(batches(rank, 1, device)[0][0]))
    assert text.startswith("optimizers in backward: DecentralizedAlgorithm")


# --- buffers ---------------------------------------------------------------------------------------------------------


def _norm_net(rank: int, device: torch.device) -> NormNet:
    torch.manual_seed(rank)
    return NormNet().to(device)


class _Averaging:
    """A hook that averages floating-point buffers, at once or in futures."""

    def __init__(self, in_background: bool) -> None:
        self.events: list[str] = []
        self._in_background = in_background

    def __call__(self, state: object, buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
        assert state is self
        assert set(buffers) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
        self.events.append("hook")
        futures = []
        for buffer in buffers.values():
            if buffer.is_floating_point():
                buffer.div_(dist.get_world_size())
                work: Any = dist.all_reduce(buffer, async_op=True)
                futures.append(work.get_future())
        if self._in_background:
            return futures
        for future in futures:
            future.wait()
        return []


# Futures are waited for at the end of the backward pass, so that a forward pass that follows would not find the result.
@pytest.mark.parametrize(
    ("place", "in_background"), [("PRE_FORWARD", False), ("POST_FORWARD", False), ("POST_FORWARD", True)]
)
@on_ranks(2)
def test_a_buffer_hook_replaces_the_broadcast(rank: int, device: torch.device, place: str, in_background: bool) -> None:
    model: Any = DistributedDataParallel(_norm_net(rank, device))
    hook = _Averaging(in_background)
    model.module.norm.register_forward_hook(lambda *_: hook.events.append("module"))
    model._register_buffer_comm_hook(hook, hook, getattr(_BufferCommHookLocation, place))
    train(model, _plain_sgd(model), batches(rank, 2, device))
    pair = ["hook", "module"] if place == "PRE_FORWARD" else ["module", "hook"]
    assert hook.events == pair * 2
    own = [model.module.norm.running_mean.clone(), model.module.norm.running_var.clone()]
    if place == "POST_FORWARD":
        for one in own:
            assert one.abs().max() > 0
        check_ranks_equal(model.module.norm, "averaged after the last forward pass")
    else:
        gathered = [torch.empty_like(own[0]) for _ in range(2)]
        dist.all_gather(gathered, own[0])
        assert not torch.equal(*gathered), "of the last forward pass, which nothing has averaged"
        model.eval()
        with torch.no_grad():  # which synchronizes what the last pass left
            model(batches(rank, 1, device)[0][0])
        check_ranks_equal(model.module.norm, "averaged before the next forward pass")


@on_ranks(2)
def test_a_buffer_hook_that_could_not_run_is_refused(rank: int, device: torch.device) -> None:
    model: Any = DistributedDataParallel(_norm_net(rank, device))
    assert "must be callable, got NoneType" in message_of(
        TypeError, lambda: model._register_buffer_comm_hook(None, None)
    )
    asynchronous: Any = DistributedDataParallel(_norm_net(rank, device), algorithm="async")
    text = message_of(NotImplementedError, lambda: asynchronous._register_buffer_comm_hook(None, _Averaging(False)))
    assert "AsyncModelAverageAlgorithm" in text
    asynchronous.bagua_algorithm.abort(asynchronous)


@pytest.mark.parametrize(
    ("forward_sync", "broadcast", "expected"),
    [(None, True, True), (None, False, False), (False, True, False), (True, False, True)],
)
@on_ranks(2)
def test_forward_sync_buffers_overrides_broadcast_buffers(
    rank: int, device: torch.device, forward_sync: bool | None, broadcast: bool, expected: bool
) -> None:
    model: Any = DistributedDataParallel(
        _norm_net(rank, device), broadcast_buffers=broadcast, forward_sync_buffers=forward_sync
    )
    assert model.forward_sync_buffers == model.broadcast_buffers
    train(model, _plain_sgd(model), batches(rank, 1, device))
    model.eval()
    model(batches(rank, 1, device)[0][0])
    gathered = [torch.empty_like(model.module.norm.running_mean) for _ in range(2)]
    dist.all_gather(gathered, model.module.norm.running_mean)
    assert torch.equal(*gathered) == expected


# --- groups ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_mesh_of_one_dimension_names_the_ranks(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = DistributedDataParallel(mlp(rank, device), device_mesh=mesh["replicate"])
    assert model.process_group is mesh["replicate"].get_group(0)
    train(model, _plain_sgd(model), batches(rank, 3, device))
    check_equal(model, _reference(rank, device))
    alone: Any = DistributedDataParallel(mlp(rank, device), device_mesh=mesh["shard"])
    assert dist.get_world_size(alone.process_group) == 1
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"device_mesh": mesh}, "1D device mesh"),
        ({"device_mesh": mesh["replicate"], "process_group": dist.group.WORLD}, "both process_group and device_mesh"),
    ]
    for given, text in wrong:
        assert text in message_of(
            RuntimeError,
            lambda given=given: DistributedDataParallel(mlp(rank, device), **given),  # type: ignore[misc]
        )


# --- communication hooks ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_fused_optimizer_steps_in_the_backward_pass(rank: int, device: torch.device) -> None:
    model: Any = DistributedDataParallel(mlp(rank, device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # as in _step_in_backward
        model._register_fused_optim(torch.optim.SGD, lr=LR)
    for batch in batches(rank, 3, device):
        model.zero_grad()
        loss_of(model, batch).backward()
    check_close(model, _reference(rank, device))
    check_ranks_equal(model)
    assert "only be called once" in message_of(
        RuntimeError, lambda: model._register_fused_optim(torch.optim.SGD, lr=LR)
    )


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
@on_ranks(2)
def test_hooks_that_torch_has_in_cpp(rank: int, device: torch.device, kind: str) -> None:
    model: Any = DistributedDataParallel(mlp(rank, device))
    start = copy.deepcopy(model.module)
    hook_type = getattr(dist.BuiltinCommHookType, kind)  # type: ignore[attr-defined]
    model._register_builtin_comm_hook(hook_type)
    train(model, _plain_sgd(model), batches(rank, 3, device))
    check_ranks_equal(model)
    reference = _reference(rank, device)
    if kind == "ALLREDUCE":
        check_equal(model, reference)
    else:
        check_close(model, reference, tolerance=1e-3)
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)), (
            "gradients travel in float16"
        )
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert "only be called once" in message_of(RuntimeError, lambda: model._register_builtin_comm_hook(hook_type))
