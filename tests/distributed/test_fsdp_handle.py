"""What compress_communication refuses, and what its handle does: removal, the state, resumption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sharded import (
    check_near,
    layers,
    param_groups,
    shard,
    train_sharded,
    twins,
    weights_of,
)
from support.training import batches, begin, message_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from bagua.codecs import codec_names
from bagua.fsdp import compress_communication


def _refused(model: nn.Module, *words: str, **options: Any) -> None:
    told = message_of(ValueError, lambda: compress_communication(model, **options))
    assert all(word in told for word in words), told
    assert len(told.splitlines()) <= 3, told


@on_ranks(2)
def test_what_cannot_be_compressed_is_named_and_nothing_changes(rank: int, device: torch.device) -> None:
    _refused(layers(), "Sequential", "fully_shard")
    model, other = twins(device)
    before = [(one._reduce_scatter_comm, one._all_gather_comm) for one in param_groups(model)]
    for options in ({"gradients": "int7"}, {"weights": "int7"}):
        _refused(model, "int7", *codec_names(), **options)
    _refused(model, "both None", gradients=None)
    _refused(model, "error_feedback", gradients=None, weights="int8", error_feedback=True)
    _refused(model, "replicas", gradients=None, weights="int8", replicas=dist.group.WORLD)
    _refused(model, "compress_shard", compress_shard=True)
    _refused(model, "exact_weights_every", exact_weights_every=2)
    _refused(model, "is 0", weights="int8", exact_weights_every=0)
    _refused(model, "is 2.5", weights="int8", exact_weights_every=2.5)
    for name, value in (("replicas", 3), ("error_feedback", "yes")):
        wrong = partial(compress_communication, model, **{name: value})
        assert f"{name} is {value!r}" in message_of(TypeError, wrong)
    _refused(model, "'0'", "reshard_after_forward=False", weights="int8", weight_differences=True)
    _refused(model, "no other", replicas=dist.group.WORLD)
    _refused(model, "Ranks [", "on all ranks", error_feedback=rank == 0)
    wide, _ = twins(device, lambda: layers().double())
    _refused(wide, "float64", "reduce_dtype")
    imaginary, _ = twins(device, lambda: nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64)))
    _refused(imaginary, "complex64", "gradients=None")
    assert [(one._reduce_scatter_comm, one._all_gather_comm) for one in param_groups(model)] == before
    handle = compress_communication(model)
    _refused(model, "compressed already", "remove()")
    handle.remove()
    compress_communication(model)

    other[0].set_all_reduce_hook(print)
    mine = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    _refused(other, "all-reduce hook", replicas=mine)


@on_ranks(2)
def test_per_parameter_meshes_are_refused_by_name(device: torch.device) -> None:
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:
        return  # this torch has one mesh for each module
    mesh = init_device_mesh(device.type, (2,))
    other = DeviceMesh.from_group(dist.new_group([0, 1]), device.type)
    info = FSDPMeshInfo(other, shard_mesh_dim=0)
    model = nn.Linear(4, 4).to(device)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), info) if parameter.dim() == 1 else Shard(0)

    fully_shard(model, mesh=mesh, shard_placement_fn=place)
    if len(param_groups(model)) > 1:
        _refused(model, "per-parameter meshes", "2 meshes")


@on_ranks(2)
def test_a_model_whose_compression_is_removed_is_as_it_was(rank: int, device: torch.device) -> None:
    everything = {"weights": "int8", "error_feedback": True, "weight_differences": True}
    ours, plain = twins(device, reshard_after_forward=False)
    before = [(one._reduce_scatter_comm, one._all_gather_comm, one._all_reduce_hook) for one in param_groups(ours)]
    handle = compress_communication(ours, **everything)
    assert handle.statistics == {purpose: {"sent": 0, "saved": 0} for purpose in ("gradients", "weights")}
    train_sharded(ours, [torch.optim.SGD(ours.parameters(), lr=0.1)], batches(rank, 3, device))
    counted = handle.statistics
    assert min(counted["gradients"].values()) > 0
    assert min(counted["weights"].values()) > 0
    handle.remove()
    after = [(one._reduce_scatter_comm, one._all_gather_comm, one._all_reduce_hook) for one in param_groups(ours)]
    assert after == before
    plain.load_state_dict(ours.state_dict())
    for model in (ours, plain):
        train_sharded(model, [torch.optim.SGD(model.parameters(), lr=0.1)], batches(rank, 3, device))
    check_near(weights_of(ours), weights_of(plain), 0, "removed")
    assert handle.statistics == counted
    # What somebody else has put there meanwhile stays.
    handle = compress_communication(ours)
    own = before[0][0]
    ours[0].set_custom_reduce_scatter(own)
    handle.remove()
    assert param_groups(ours)[0]._reduce_scatter_comm is own


_RESUMED: tuple[dict[str, Any], ...] = (
    {"gradients": "int8", "error_feedback": True},
    {"weights": "int8", "error_feedback": True, "weight_differences": True, "exact_weights_every": 4},
    {"gradients": None, "weights": "int8", "exact_weights_every": 2},
)


def _made(device: torch.device, options: dict[str, Any], seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = shard(layers().to(device), device, reshard_after_forward=False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), compress_communication(model, **options)


def _resume(folder: str) -> None:
    rank, device = begin()
    for number, options in enumerate(_RESUMED):
        model, optimizer, handle = _made(device, options, 1)
        train_sharded(model, [optimizer], batches(rank, 3, device))
        saved, saved_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": saved, "optimizer": saved_optimizer}, checkpoint_id=f"{folder}/{number}")
        torch.save(handle.state_dict(), f"{folder}/{number}-{rank}.pt")
        train_sharded(model, [optimizer], batches(rank, 3, device, seed=1))

        again, other, resumed = _made(device, options, 2)
        loaded, loaded_optimizer = get_state_dict(again, other)
        dcp.load({"model": loaded, "optimizer": loaded_optimizer}, checkpoint_id=f"{folder}/{number}")
        set_state_dict(again, other, model_state_dict=loaded, optim_state_dict=loaded_optimizer)
        state = torch.load(f"{folder}/{number}-{rank}.pt")
        resumed.load_state_dict(state)
        train_sharded(again, [other], batches(rank, 3, device, seed=1))
        check_near(weights_of(again), weights_of(model), 0, f"{options}")
        # A state that was loaded and not used yet is saved as it is.
        assert str(resumed.state_dict()["settings"]) == str(state["settings"])

        for change, words in (
            ({"settings": {**state["settings"], "ranks": 8}}, ("ranks was 8 and is 2", "Continue without it")),
            ({"settings": {**state["settings"], "error_feedback": "no"}}, ("error_feedback was 'no'",)),
            ({"residuals": {"7": torch.zeros(1)}}, ("['7']",)),
            ({"version": 99}, ("version 99", "state_dict()")),
        ):
            told = message_of(ValueError, partial(resumed.load_state_dict, {**state, **change}))
            assert all(word in told for word in words), told


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(2, _resume, str(tmp_path))
