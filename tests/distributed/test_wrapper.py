"""DistributedDataParallel: its arguments, attributes and signature beside torch's."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from support.ranks import run_ranks
from support.training import NormNet, batches, begin, message_of, mlp, momentum, train
from torch import nn

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.data_parallel import distributed as wrapper_module
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel


def test_arguments_have_the_places_of_torch() -> None:
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    common = [name for name in ours if name in theirs]
    assert common == [name for name in theirs if name in ours]
    assert [*ours][: len(common)] == common
    assert [*ours][len(common) :] == ["optimizers", "algorithm"]
    assert wrapper_module.DistributedDataParallel_V1_9_0 is DistributedDataParallel


def _attributes() -> None:
    rank, device = begin()
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
    assert not model.will_sync_module_buffers()
    train(model, optimizer, batches(rank, 2, device))
    assert model.bagua_train_step_counter == 2
    assert len(model.bagua_buckets) == 1
    assert "Algorithm" in message_of(NotImplementedError, lambda: model.register_comm_hook(None, None))
    message_of(AttributeError, lambda: setattr(model, "require_backward_grad_sync", False))
    with_buffers: Any = DistributedDataParallel(NormNet().to(device))
    assert not with_buffers.will_sync_module_buffers(), "they were broadcast just now"
    with_buffers(batches(rank, 1, device)[0][0])
    assert with_buffers.will_sync_module_buffers()
    local: Any = DistributedDataParallel(NormNet().to(device), broadcast_buffers=False)
    local(batches(rank, 1, device)[0][0])
    assert not local.will_sync_module_buffers()


def test_what_a_wrapper_has() -> None:
    run_ranks(2, _attributes)


def _arguments() -> None:
    _, device = begin()

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
    split = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    assert "one device" in message_of(ValueError, lambda: DistributedDataParallel(split))
    message_of(TypeError, lambda: made(net(), process_group="world"))
    message_of(TypeError, lambda: made(net(), algorithm="gradient_allreduce"))
    one = net()
    message_of(TypeError, lambda: made(one, optimizers=momentum(one)))
    # Taken, and without consequence, as in torch.
    made(net(), dim=1, check_reduction=True, output_device=device if device.type == "cuda" else None)


def test_arguments_that_mean_nothing_are_refused() -> None:
    run_ranks(1, _arguments)


def _moved() -> None:
    rank, device = begin()
    net = mlp(rank, device)
    model: Any = DistributedDataParallel(net, output_device=torch.device("cpu"))
    assert model(batches(rank, 1, device)[0][0]).device.type == "cpu"


def test_outputs_are_moved_where_asked() -> None:
    run_ranks(1, _moved)
