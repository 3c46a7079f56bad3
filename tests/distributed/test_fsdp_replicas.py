"""Hybrid sharding, on a mesh with a dimension for replicas and on a mesh of shards with a group of replicas: next to
torch's own, with the same settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded import check_near, gradients_of, layers, param_groups, shard, train_sharded, weights_of
from support.sweeps import each_value_once
from support.training import batches, begin, check_tensor_on_ranks, loss_of, message_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

from bagua.fsdp import compress_communication

# What int8 may take of the largest gradient: of what replicas send, of their average, and within a replica.
SHARE = 3 / 250


def _begin() -> tuple[int, torch.device, DeviceMesh]:
    rank, device = begin()
    return rank, device, init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))


def _twins(device: torch.device, mesh: DeviceMesh, own: DeviceMesh | None = None, **options: Any) -> tuple[Any, Any]:
    """With the same weights on all ranks: one on the mesh `own`, and torch's on `mesh`."""
    torch.manual_seed(5)
    net = layers().to(device)
    return shard(copy.deepcopy(net), device, own or mesh, **options), shard(net, device, mesh, **options)


def _each(models: tuple[Any, ...], name: str, value: Any) -> None:
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, name)(value)


def _backward(models: tuple[Any, ...], rank: int, device: torch.device, number: int = 1) -> None:
    for batch in batches(rank, number, device):
        for model in models:
            loss_of(model, batch).backward()


def _halve(reduced: Tensor) -> None:
    reduced.mul_(0.5)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"compress_shard": True},
    {"error_feedback": True, "compress_shard": True, "weights": "int8"},
)


def _native_mesh(kept: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    rank, device, mesh = _begin()
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    models = _twins(device, mesh, reshard_after_forward=not kept, mp_policy=policy)
    before = [one.mesh_info.replicate_process_group for one in param_groups(models[0])]
    exactly = {"exact_weights_every": 1} if "weights" in options else {}
    handle = compress_communication(models[0], **options, **exactly)
    _backward(models, rank, device)
    what = f"{dtype} {options}"
    check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, what)
    for name, one in gradients_of(models[0]).items():
        check_tensor_on_ranks(one, f"{what}: {name}")
    assert handle.statistics["gradients"]["saved"] > 0, what
    residuals = set(handle.state_dict()["residuals"])
    assert len(residuals) == (6 if "error_feedback" in options else 0)
    # Taken back, it is torch's, bitwise.
    handle.remove()
    assert [one.mesh_info.replicate_process_group for one in param_groups(models[0])] == before
    for model in models:
        model.zero_grad()
    _backward(models, rank, device)
    check_near(gradients_of(models[0]), gradients_of(models[1]), 0, f"removed: {what}")


def _native_settings() -> None:
    rank, device, mesh = _begin()
    # Gradient accumulation: without any communication, and without that between replicas.
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        models = _twins(device, mesh)
        handle = compress_communication(models[0], compress_shard=True)
        data = batches(rank, 3, device)
        sent = []
        for number, batch in enumerate(data):
            for model in models:
                getattr(model, name)(number == len(data) - 1)
                loss_of(model, batch).backward()
            sent.append(handle.statistics["gradients"]["sent"])
        check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, name)
        steps = [sent[0], sent[1] - sent[0], sent[2] - sent[1]]
        assert steps[0] == steps[1] < steps[2], (name, steps)
    # A user's own hook stays.
    models = _twins(device, mesh)
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(_halve)
    compress_communication(models[0])
    _backward(models, rank, device)
    check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, "hook")
    # Backward gathers from one rank fewer than forward, with a mesh of its own.
    models = _twins(device, mesh, reshard_after_forward=1)
    compress_communication(models[0])
    _backward(models, rank, device)
    check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, "reshard_after_forward=1")
    if hasattr(models[0], "set_separate_reduce_scatter_group"):
        models = _twins(device, mesh)
        handle = compress_communication(models[0], compress_shard=True)
        models[0].set_separate_reduce_scatter_group()
        _backward(models, rank, device)
        check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, "separate group")
        handle.remove()
        assert all(one.mesh_info.reduce_scatter_process_group is not None for one in param_groups(models[0]))


def _factors() -> None:
    """torch divides by the factor alone, whatever the number of replicas; gloo does so with sums only."""
    rank, device, mesh = _begin()
    for own, forced_first in ((None, True), (mesh["shard"], False)):
        models = _twins(device, mesh, own)
        replicas = None if own is None else mesh.get_group("replicate")
        if not forced_first:
            compress_communication(models[0], replicas=replicas)
        for factor in (4.0, 3.0):
            _each(models, "set_gradient_divide_factor", factor)
        _each(models, "set_force_sum_reduction_for_comms", True)
        if forced_first:
            compress_communication(models[0], replicas=replicas)
        _backward(models, rank, device)
        check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, f"factor 3, {own}")
        # Without sums alone, the reduction within a replica multiplies by the factor, which gloo cannot do.
        if own is not None:
            compressed = _twins(device, mesh, own)[0]
            _each((compressed,), "set_gradient_divide_factor", 3.0)
            compress_communication(compressed, replicas=replicas, compress_shard=True)
            _backward((compressed,), rank, device)
            check_near(gradients_of(compressed), gradients_of(models[1]), SHARE, "compressed shards")


def _group_of_replicas() -> None:
    rank, device, mesh = _begin()
    replicas = mesh.get_group("replicate")
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float16)):
        models = _twins(device, mesh, mesh["shard"], mp_policy=policy)
        compress_communication(models[0], replicas=replicas)
        # torch's own hooks take no notice of it either: they are called in each pass.
        for model in models:
            model.set_requires_all_reduce(False)
        _backward(models[:1], rank, device, 2)
        models[1].set_requires_all_reduce(True)
        _backward(models[1:], rank, device, 2)
        check_near(gradients_of(models[0]), gradients_of(models[1]), SHARE, str(policy))
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    torch.manual_seed(rank // 2)
    ours = shard(layers(), device, mesh["shard"], offload_policy=offload)
    compress_communication(ours, replicas=replicas)
    _backward((ours,), rank, device)
    for name, one in {**weights_of(ours), **gradients_of(ours)}.items():
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, one.cpu())
        assert all(torch.equal(one.cpu(), other) for other in of_all), name
    # A hook that is set later would leave replicas without averages.
    ours = _twins(device, mesh, mesh["shard"])[0]
    compress_communication(ours, replicas=replicas)
    ours[1].set_all_reduce_hook(print)
    told = message_of(RuntimeError, lambda: ours(batches(rank, 1, device)[0][0]))
    assert "set_all_reduce_hook of module '1'" in told
    assert len(told.splitlines()) <= 3


def _refusals_and_errors() -> None:
    rank, device, mesh = _begin()
    ours, plain = _twins(device, mesh)
    told = message_of(ValueError, lambda: compress_communication(ours, replicas=mesh.get_group("replicate")))
    assert "has a dimension for replicas" in told
    told = message_of(ValueError, lambda: compress_communication(ours, "int4" if rank == 3 else "int8"))
    assert ("Ranks [3]" if rank != 3 else "Ranks [0, 1, 2]") in told
    handle = compress_communication(ours)
    assert "compressed already" in message_of(ValueError, lambda: compress_communication(ours))
    # What fails in the all-reduce is what the user reads.
    group = param_groups(ours)[0].mesh_info.replicate_process_group
    with pytest.raises(ValueError, match="AVG, SUM or PREMUL_SUM"):
        dist.all_reduce(torch.ones(3, device=device), dist.ReduceOp.MAX, group=group)
    handle.remove()
    # Training, and a checkpoint that a model without compression loads.
    compress_communication(ours, "int8", error_feedback=True)
    for model in (ours, plain):
        train_sharded(model, [torch.optim.SGD(model.parameters(), lr=0.05)], batches(rank, 5, device), clip=1.0)
    check_near(weights_of(ours), weights_of(plain), 0.02, "weights")
    for name, one in weights_of(ours).items():
        check_tensor_on_ranks(one, name)
    with torch.no_grad():
        for name, one in plain.named_parameters():
            one.copy_(distribute_tensor(weights_of(ours)[name], one.device_mesh, one.placements))
    plain.load_state_dict(ours.state_dict())
    check_near(weights_of(ours), weights_of(plain), 0, "state")


@pytest.mark.parametrize(
    ("kept", "dtype", "options"),
    each_value_once((True, False), (torch.float32, torch.bfloat16, torch.float16), OPTIONS),
)
def test_a_mesh_with_a_dimension_for_replicas(kept: bool, dtype: torch.dtype, options: dict[str, Any]) -> None:
    run_ranks(4, _native_mesh, kept, dtype, options, timeout=120, reuse=True)


CASES = (
    _native_settings,
    _factors,
    _group_of_replicas,
    _refusals_and_errors,
)


@pytest.mark.parametrize("case", CASES)
def test_hybrid_sharding(case: Any) -> None:
    # torch may name the separate group like one of an earlier test.
    run_ranks(4, case, timeout=120, reuse=case is not _native_settings)
