"""DistributedDataParallel: its arguments, attributes and signature beside torch's."""

from __future__ import annotations

import copy
import inspect
import os
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from support.training import (
    NormNet,
    batches,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    counted_all_reduces,
    loss_of,
    message_of,
    mlp,
    momentum,
    pair,
    torch_ddp,
    train,
)
from torch import nn

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel import distributed as wrapper_module
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel


def test_arguments_have_the_places_of_torch() -> None:
    """Positions and defaults are those of Bagua 0.9. What torch has beside them has to be named, with torch's default,
    and so has what torch has not.
    A new argument of torch fails here with its name."""
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    positional = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *("self", "module", "device_ids", "output_device", "dim", "broadcast_buffers", "process_group"),
        *("bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view"),
        *("optimizers", "algorithm"),
    ]
    assert [name for name in theirs if name not in ours] == [], "arguments that Bagua's wrapper does not know"
    new = {"batch_weights": False, "count_batch": False, "loss": "mean"}
    assert [name for name in ours if name not in theirs] == ["optimizers", "algorithm", *new]
    named = {name: one.default for name, one in ours.items() if one.kind is one.KEYWORD_ONLY}
    assert named == {name: theirs[name].default for name in named if name in theirs} | new
    assert wrapper_module.DistributedDataParallel_V1_9_0 is DistributedDataParallel


@on_ranks(2)
def test_what_a_wrapper_has(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    optimizer = momentum(net)
    model: Any = DistributedDataParallel(net, optimizers=[optimizer])
    assert model.module is net
    assert isinstance(model.inner, BaguaDistributedDataParallel)
    assert isinstance(model.bagua_algorithm, GradientAllReduceAlgorithmImpl)
    assert model.bagua_optimizers == [optimizer]
    assert model.device == device
    assert model.device_type == device.type
    assert not model.is_multi_device_module
    assert not model.static_graph
    assert model.require_backward_grad_sync
    assert model.parameters_to_ignore == []
    assert model.bagua_module_name == model.inner.bagua_module_name
    assert [name for name, _ in model.bagua_build_params()] == [name for name, _ in net.named_parameters()]
    assert not model.will_sync_module_buffers(), "it has none"
    train(model, optimizer, batches(rank, 2, device))
    assert model.bagua_train_step_counter == 2
    assert len(model.bagua_buckets) == 1
    assert isinstance(model, nn.parallel.DistributedDataParallel), "as frameworks ask before they read model.module"
    with_buffers: Any = DistributedDataParallel(NormNet().to(device))
    assert with_buffers.will_sync_module_buffers(), "they may have been changed since the wrapper was made"
    with torch.no_grad():
        with_buffers(batches(rank, 1, device)[0][0])
    assert not with_buffers.will_sync_module_buffers(), "they were broadcast just now"
    with_buffers(batches(rank, 1, device)[0][0])
    assert with_buffers.will_sync_module_buffers()
    local: Any = DistributedDataParallel(NormNet().to(device), broadcast_buffers=False)
    local(batches(rank, 1, device)[0][0])
    assert not local.will_sync_module_buffers()


@on_ranks(1)
def test_arguments_that_mean_nothing_are_refused(device: torch.device) -> None:

    def made(net: nn.Module, **options: Any) -> Any:
        return DistributedDataParallel(net.to(device), **options)

    def net() -> nn.Module:
        return nn.Linear(2, 2)

    frozen = net().requires_grad_(False)
    assert "requires a gradient" in message_of(RuntimeError, lambda: made(frozen))
    assert "bucket_cap_mb=0" in message_of(ValueError, lambda: made(net(), bucket_cap_mb=0))
    assert "one device" in message_of(ValueError, lambda: made(net(), device_ids=[0, 1]))
    if device.type == "cpu":
        assert "module is on cpu" in message_of(ValueError, lambda: made(net(), device_ids=[0]))
        for elsewhere in (0, "cuda"):
            told = message_of(ValueError, lambda one=elsewhere: made(net(), output_device=one))
            assert f"output_device={elsewhere!r}, but the module is on the CPU" in told
    split = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    assert "one device" in message_of(ValueError, lambda: DistributedDataParallel(split))
    message_of(TypeError, lambda: made(net(), process_group="world"))
    assert "gradient_allreduce" in message_of(KeyError, lambda: made(net(), algorithm="gradient_allreduced"))
    assert isinstance(made(net(), algorithm="gradient_allreduce").bagua_algorithm, GradientAllReduceAlgorithmImpl)
    one = net()
    message_of(TypeError, lambda: made(one, optimizers=momentum(one)))
    # Taken, and without consequence, as in torch.
    made(net(), dim=1, check_reduction=True, output_device=device if device.type == "cuda" else None)


@on_ranks(1)
def test_outputs_are_moved_where_asked(rank: int, device: torch.device) -> None:
    net = mlp(rank, device)
    model: Any = DistributedDataParallel(net, output_device=torch.device("cpu"))
    assert model(batches(rank, 1, device)[0][0]).device.type == "cpu"


class _Told(torch.Tensor):
    """Keeps what `to` was given."""

    def to(self, *arguments: Any, **keywords: Any) -> Any:
        self.told = arguments, keywords
        return self


def test_nobody_reads_on_the_cpu_before_outputs_have_come() -> None:
    for device, beside in ((torch.device("cpu"), False), (torch.device("cuda", 1), True)):
        output: Any = torch.zeros(2).as_subclass(_Told)
        wrapper_module._moved({"output": output}, device)
        assert output.told == ((device,), {"non_blocking": beside})


@on_ranks(2)
def test_none_is_the_default_as_in_torch(rank: int, device: torch.device) -> None:
    net = NormNet().to(device)
    model: Any = DistributedDataParallel(net, broadcast_buffers=None, bucket_cap_mb=None, optimizers=None)
    assert model.bucket_cap_mb == 25
    assert model.bagua_optimizers == []
    for batch in batches(rank, 2, device):
        model(batch[0]).sum().backward()
        net.zero_grad()
    model.eval()(batches(0, 1, device)[0][0])
    check_ranks_equal(net)


@on_ranks(1)
def test_bucket_sizes_that_mean_nothing_are_refused(device: torch.device) -> None:
    net = nn.Linear(2, 2).to(device)
    for cap in (float("inf"), float("nan"), 1e308, -1):
        message = message_of(ValueError, lambda cap=cap: DistributedDataParallel(net, bucket_cap_mb=cap))  # type: ignore[misc]
        assert f"bucket_cap_mb={cap}: must be more than 0 MiB" in message
    cap: Any = "25"
    assert "bucket_cap_mb='25'" in message_of(TypeError, lambda: DistributedDataParallel(net, bucket_cap_mb=cap))
    none: Any = None
    assert "optimizers is None" in message_of(
        TypeError,
        lambda: net.with_bagua(none, GradientAllReduceAlgorithm()),  # type: ignore[operator]
    )


@on_ranks(2)
def test_a_wrap_that_fails_late_leaves_an_ordinary_module(rank: int, device: torch.device) -> None:

    def refused(net: nn.Module, kind: type[Exception]) -> str:
        message = message_of(kind, lambda: DistributedDataParallel(net))
        assert "bagua_ddp" not in net.__dict__
        assert not net._forward_hooks
        assert not net._forward_pre_hooks
        assert not any(parameter.is_bagua_tensor() for parameter in net.parameters())  # type: ignore[attr-defined]
        return message

    net = mlp(rank, device)
    net.register_buffer("eye", torch.eye(3, device=device).to_sparse())
    assert "eye cannot be broadcast" in refused(net, ValueError)
    # On rank 0 too, which would only read it.
    net.register_buffer("eye", torch.ones(1, 1, device=device).expand(3, 3))
    assert "eye cannot be broadcast: it is expanded" in refused(net, ValueError)
    # Values would be shifted into other buffers.
    net.register_buffer("eye", torch.ones(1 + rank, device=device))
    net.append(nn.BatchNorm1d(4).to(device))
    message = refused(net, RuntimeError)
    assert "different frozen parameters and buffers. At position 0, rank 0 has 'eye' (float32 [1]" in message
    assert "rank 1 has 'eye' (float32 [2]" in message
    del net.eye
    model = DistributedDataParallel(net)
    check_ranks_equal(net)
    loss_of(model, batches(rank, 1, device)[0]).backward()
    check_tensor_on_ranks(net[0].weight.grad, "gradient")


@on_ranks(2)
def test_the_log_level_is_read_before_anything_is_sent(rank: int, device: torch.device) -> None:
    net: Any = mlp(rank, device)
    kept = net[0].weight.clone()
    os.environ["BAGUA_LOG_LEVEL"] = "loud"
    for wrap in (
        DistributedDataParallel,
        lambda one: one.with_bagua([torch.optim.SGD(one.parameters(), lr=0.1)], GradientAllReduceAlgorithm()),
    ):
        with counted_all_reduces() as calls:
            assert "BAGUA_LOG_LEVEL=loud" in message_of(ValueError, lambda wrap=wrap: wrap(net))  # type: ignore[misc]
        assert not calls
        assert "bagua_ddp" not in net.__dict__
        assert not net._forward_hooks
        assert torch.equal(net[0].weight, kept), "nothing was broadcast"


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}])
@on_ranks(2)
def test_parameters_of_two_wrapped_modules_are_refused(
    rank: int, device: torch.device, options: dict[str, Any]
) -> None:
    shared = nn.Linear(10, 50)
    first = nn.Sequential(nn.Linear(2, 10), shared, nn.Linear(50, 4)).to(device)
    second = nn.Sequential(nn.Linear(2, 10), shared).to(device)
    optimizer = momentum(first)
    model: Any = DistributedDataParallel(first, optimizers=[optimizer], **options)
    train(model, optimizer, batches(rank, 1, device))
    for wrap in (
        lambda: DistributedDataParallel(second, **options),
        lambda: DistributedDataParallel(shared, **options),
    ):
        message = message_of(ValueError, wrap)
        assert f"belongs to module {model.bagua_module_name!r}" in message
        assert "Wrap one module that contains both" in message
    # The first goes on, undisturbed.
    train(model, optimizer, batches(rank, 2, device, seed=1))
    check_ranks_equal(first)
    model.inner.detach()
    other: Any = DistributedDataParallel(second)
    model.inner.detach()  # what is not its own any more stays
    train(other, momentum(second), [(x, torch.zeros(4, 50, device=device)) for x, _ in batches(rank, 2, device)])
    check_ranks_equal(second)


@on_ranks(2)
def test_gradients_whose_data_is_assigned_stay_those_of_torch(rank: int, device: torch.device) -> None:
    both = pair("wrapper", rank, device)
    for batch in batches(rank, 4, device):
        for model, optimizer in both:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:  # zero_grad, as it was
                        parameter.grad.detach_()
                        parameter.grad.zero_()
            loss_of(model, batch).backward()
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)
            optimizer.step()
    check_equal(both[0][0], both[1][0])


@on_ranks(1)
def test_ignore_lists_that_ignore_nothing_are_noticed(device: torch.device) -> None:

    def wrapped(ignored: Any) -> Any:
        net: Any = NormNet().to(device)
        net._ddp_params_and_buffers_to_ignore = ignored
        return net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], GradientAllReduceAlgorithm())

    assert "is 'first.weight'; give a list" in message_of(TypeError, lambda: wrapped("first.weight"))
    assert "holds 3; give names" in message_of(TypeError, lambda: wrapped([3]))
    warning = message_of(UserWarning, lambda: wrapped(["first.wieght"]))
    assert "NormNet has no parameter or buffer 'first.wieght'" in warning
    assert "names near it: first.weight" in warning
    assert wrapped({"norm.running_mean", "first.bias"}).parameters_to_ignore
    net: Any = NormNet()
    net.scale = nn.Parameter(torch.ones(1))
    net.register_buffer("later", None)
    net._bagua_params_and_buffers_to_ignore = [".scale", "later"]
    net.to(device).with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    assert net.parameters_to_ignore == ["scale", "later"]


@on_ranks(2)
def test_buffers_that_change_before_the_first_forward_pass(rank: int, device: torch.device) -> None:
    """As `load_state_dict` on one rank does."""
    ((ours, optimizer), (theirs, other)) = pair("wrapper", rank, device, NormNet)
    for model in (ours.module, theirs.module):
        model.norm.running_mean.fill_(1.0 + rank)
    with torch.no_grad():
        ours.eval()(torch.ones(3, 2, device=device))
        theirs.eval()(torch.ones(3, 2, device=device))
    assert ours.module.norm.running_mean.eq(1.0).all()
    train(ours.train(), optimizer, batches(rank, 3, device))
    train(theirs.train(), other, batches(rank, 3, device))
    check_equal(ours, theirs)


@on_ranks(2)
def test_device_ids_move_the_inputs(rank: int, device: torch.device) -> None:
    """Inputs come from the CPU, which device_ids is for. On CPUs it is empty, as torch wants it there."""
    ids = [device.index] if device.type == "cuda" else []
    torch.manual_seed(rank)
    net = mlp(rank, device)
    twin = copy.deepcopy(net)
    optimizer, other = momentum(net), momentum(twin)
    ours = DistributedDataParallel(net, device_ids=ids, optimizers=[optimizer])
    theirs = torch_ddp(twin, device_ids=ids or None)
    assert ours.device_ids == theirs.device_ids
    for x, target in batches(rank, 4, "cpu"):
        for model, one in ((ours, optimizer), (theirs, other)):
            one.zero_grad()
            output = model(x)
            assert output.device == device
            nn.functional.mse_loss(output, target.to(device)).backward()
            one.step()
    check_equal(ours, theirs)
