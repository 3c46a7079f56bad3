"""Calls that people write because another library, or another version, has them: the error says what to write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua.fsdp
import bagua.torch_api as bagua_api
from bagua.misuse import explains_calls
from bagua.torch_api import communication
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.contrib import (
    CachedDataset,
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
    RegroupSampler,
    fuse_optimizer,
)
from bagua.torch_api.data_parallel import DistributedDataParallel

MODEL: Any = nn.Linear(2, 2)
STORE: Any = dist.HashStore()
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
ONES: Any = torch.ones(2)
api: Any = bagua_api
fsdp: Any = bagua.fsdp
wrapper: Any = DistributedDataParallel
sampler: Any = LoadBalancingDistributedSampler
batch_sampler: Any = LoadBalancingDistributedBatchSampler
fuse: Any = fuse_optimizer


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: api.init_process_group("nccl"), "init_process_group(backend='nccl')"),
        (lambda: api.init_process_group(0, 2), "store is 0. Pass a torch.distributed.Store"),
        (lambda: api.init_process_group(init_method="env://"), "Leave init_method out"),
        (lambda: api.init_process_group(device_id=0), "call torch.cuda.set_device(device_id) before"),
        (lambda: api.init_process_group(STORE, "0", 1, 1), "rank is '0'. Pass an integer"),
        (lambda: api.init_process_group(STORE, 0, 1.0, 1), "world_size is 1.0. Pass an integer"),
        (lambda: api.init_process_group(regroup=True), "regroup is True. Pass bagua.torch_api.Regroup()"),
        (lambda: api.init_process_group(regroup=api.Regroup), "regroup is the class Regroup. Pass"),
        (lambda: api.Regroup(min_ranks=2.0), "min_ranks is 2.0. Pass a number of ranks"),
        (lambda: api.init_process_group(time_out=3), "Did you mean 'timeout'?"),
        (lambda: api.allreduce(ONES), "or allreduce_inplace for one tensor"),
        (lambda: api.alltoall_v(ONES), "or alltoall_v_inplace for one tensor"),
        (lambda: api.allreduce_inplace(ONES, async_op=True), "Leave async_op out"),
        (lambda: api.broadcast(ONES, group=None), "comm=from_torch_group(group).get_global_communicator()"),
        (lambda: api.barrier(com=None), "Did you mean 'comm'?"),
        (lambda: api.with_bagua("model", [OPTIMIZER]), "model is 'model'. Pass an instance of torch.nn.Module"),
        (lambda: api.with_bagua([OPTIMIZER], MODEL), "model is a list. Pass an instance"),
        (lambda: api.with_bagua(nn.Linear, [OPTIMIZER]), "model is the class Linear. Pass an instance"),
        (lambda: api.with_bagua(MODEL), "with_bagua(model, [optimizer], 'bytegrad')"),
        (lambda: api.with_bagua(MODEL, [OPTIMIZER], batch_weights="yes"), "batch_weights is 'yes'. Pass True or False"),
        (lambda: api.with_bagua(MODEL, [OPTIMIZER], count_batch=None), "count_batch is None. Pass True or False"),
        (lambda: api.with_bagua(MODEL, [OPTIMIZER], autotune="no"), "autotune is 'no'. Pass True or False"),
        (lambda: api.with_bagua(MODEL, [OPTIMIZER], do_flatten=[]), "do_flatten is a list. Pass True or False"),
        (lambda: api.with_bagua(MODEL, [OPTIMIZER], do_flatten=ONES), "do_flatten is a Tensor. Pass True or False"),
        (
            lambda: api.with_bagua(MODEL, [OPTIMIZER], find_unused_parameters=2),
            "find_unused_parameters is 2. Pass True",
        ),
        (lambda: MODEL.with_bagua([OPTIMIZER], algorithms="bytegrad"), "Did you mean 'algorithm'?"),
        (lambda: MODEL.with_bagua([OPTIMIZER], "bytegrad", codec="int4"), "init('bytegrad', codec='int4')"),
        (lambda: wrapper("model"), "module is 'model'. Pass an instance of torch.nn.Module"),
        (lambda: wrapper(MODEL, device_ids="0"), "device_ids is '0'. Pass a list"),
        (lambda: wrapper(MODEL, static_graph="False"), "static_graph is 'False'. Pass True or False"),
        (lambda: wrapper(MODEL, broadcast_buffers=()), "broadcast_buffers is a tuple. Pass True or False"),
        (lambda: wrapper(MODEL, count_batch=64), "count_batch is 64. Pass True or False"),
        (lambda: wrapper(MODEL, bucket_cap_mb=True), "bucket_cap_mb=True: must be a number of MiB"),
        (lambda: wrapper(MODEL, find_unused_parameter=True), "Did you mean 'find_unused_parameters'?"),
        (lambda: fuse("sgd"), "optimizer is 'sgd'. Pass a torch.optim.Optimizer"),
        (lambda: fuse([OPTIMIZER]), "optimizer is a list. Pass a torch.optim.Optimizer"),
        (lambda: fuse(OPTIMIZER, flatten=True), "Did you mean 'do_flatten'?"),
        (lambda: sampler([1], None, 1, 0), "complexity_fn is None. Pass a function"),
        (lambda: sampler([1], float, 1, 0, shares="auto"), "BalancedSampler(dataset, batch_size=512, complexity_fn="),
        (lambda: sampler([1], float, "1", 0), "num_replicas is '1'. Pass an integer"),
        (lambda: sampler([1], float, 1, 0.0), "rank is 0.0. Pass an integer"),
        (lambda: sampler([1], float, 1, 0, shuffle="no"), "shuffle is 'no'. Pass True or False"),
        (lambda: sampler([1], float, 1, 0, random_level="0.1"), "random_level is '0.1'. Pass a number between 0 and 1"),
        (lambda: batch_sampler(sampler([1], float, 1, 0), 8), "batch_fn is 8. Pass a function"),
        (lambda: batch_sampler(sampler([1], float, 1, 0), list, "no"), "drop_last is 'no'. Pass True or False"),
        (lambda: RegroupSampler([1], accumulation=1.5), "accumulation is 1.5. Pass an integer"),  # type: ignore[arg-type]
        (lambda: RegroupSampler([1], shuffle="no"), "shuffle is 'no'. Pass True or False"),  # type: ignore[arg-type]
        (lambda: sampler([1], float, 1, 0, drop=True), "Did you mean 'drop_last'?"),
        (lambda: batch_sampler(sampler([1], float, 1, 0), list, shares=[1]), "BalancedSampler(dataset, batch_size=512"),
        (lambda: fsdp.compress_communication("model"), "model is 'model'. Pass the torch.nn.Module"),
        (lambda: fsdp.compress_communication(MODEL, codec="int4"), "gradients='int8', weights='int8'"),
        (lambda: fsdp.compress_communication(MODEL, gradient="int4"), "Did you mean 'gradients'?"),
        (lambda: fsdp.measure_communication("model"), "model is 'model'. Pass the torch.nn.Module"),
        (lambda: Algorithm.init("diloco", codec="int4"), "Algorithm.init('streaming_diloco', codec='int4', ...)"),
        (lambda: Algorithm.init("gradient_allreduce", codec="int4"), "Algorithm.init('bytegrad', codec='int4', ...)"),
        (lambda: Algorithm.init("bytegrad", codecs="int4"), "Did you mean 'codec'?"),
        (lambda: Algorithm.init("bytegrad", hierarchical="no"), "hierarchical is 'no'. Pass True or False"),
        (lambda: CachedDataset([1], capacity="5G"), "Did you mean 'capacity_bytes'?"),
    ],
)
def test_the_error_has_the_right_call(call: Callable[[], object], said: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert said in str(raised.value)
    assert raised.value.__cause__ is None


def test_flags_and_numbers_of_other_libraries_are_those_of_python() -> None:
    given = sampler(
        [3, 1, 2], float, np.int64(1), np.int32(0), shuffle=np.False_, drop_last=0, random_level=np.float32(0)
    )
    assert list(given) == [1, 2, 0]
    assert Algorithm.init("bytegrad", hierarchical=np.False_, average=1)
    assert list(batch_sampler(given, lambda indices: [indices], torch.tensor(True))) == [[1, 2, 0]]


@pytest.mark.parametrize("name", ["int4", "INT8", "fp8_e4m3"])
def test_a_codec_is_no_algorithm(name: str) -> None:
    with pytest.raises(ValueError, match=f"codec='{name.lower()}'"):
        Algorithm.init(name)


def test_only_the_call_itself_is_explained() -> None:
    """What the function raises is its own."""

    @explains_calls("Call it right.", other="Leave other out.")
    def called(one: int, *, two: int = 0) -> int:
        return one + two

    assert called(1, two=2) == 3
    wrong: Any = called
    with pytest.raises(TypeError, match=r"^can only concatenate[^\n]*$"):
        wrong("text")
    for call, said in (
        (wrong, r"missing 1 required positional argument: 'one'\.\nCall it right\.$"),
        (lambda: wrong(1, 2), r"positional argument.* given\.\nCall it right\.$"),
        (lambda: wrong(1, other=2), r"\.\nLeave other out\.$"),
        (lambda: wrong(1, tow=2), r"Did you mean 'two'\?\nCall it right\.$"),
        (lambda: wrong(1, unlike=2), r"'unlike'\.?\nCall it right\.$"),
    ):
        with pytest.raises(TypeError, match=said):
            call()


def test_names_of_torch_api() -> None:
    assert bagua_api.__version__ == bagua.__version__
    for name in ("new_group", "is_initialized", "destroy_process_group", "broadcast_object"):
        assert getattr(bagua_api, name) is getattr(communication, name)
    for name, said in (
        ("all_reduce", "Did you mean 'allreduce'?"),
        ("CollectiveError", "there is bagua.torch_api.communication.CollectiveError"),
        ("DistributedDataParallel", "there is bagua.torch_api.data_parallel.DistributedDataParallel"),
    ):
        with pytest.raises(AttributeError) as raised:
            getattr(api, name)
        assert said in str(raised.value)
    assert not hasattr(api, "__wrapped__")


def test_a_group_ends_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="is not initialized"):
        bagua_api.destroy_process_group()
    for _ in range(2):
        bagua_api.init_process_group(backend="gloo")
        part = bagua_api.new_group([0])
        bagua_api.destroy_process_group(part)
        assert bagua_api.is_initialized()
        bagua_api.barrier()
        bagua_api.destroy_process_group()
        assert not bagua_api.is_initialized()
        assert not dist.is_initialized()


@pytest.mark.parametrize("module", ["bagua.fsdp", "bagua.comm_hooks", "bagua.torch_api"])
def test_without_torch_the_import_says_what_to_install(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import bagua; print('bagua'); import {module}"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (1, "bagua\n"), done.stderr
    assert f"ModuleNotFoundError: {module} needs torch, which is not installed.\nInstall it" in done.stderr


def test_a_folder_that_no_cache_can_be_in(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="path='/proc/nosuch/cache' cannot be the folder of a cache: No such file"):
        CachedDataset([1], path="/proc/nosuch/cache")
    assert CachedDataset([1], path=str(tmp_path / "made"))[0] == 1
