"""A module on cuda:1 in a script that never calls torch.cuda.set_device: all that Bagua does for it is done there.

Two ranks with a GPU each, in groups of NCCL alone, as torch's tutorial and torch's own tests make them. All sections
run in one start of the ranks; each is told by itself.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import gc
import importlib.util
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.algorithm_cases import CASES, Case, outer_sgd, pulling, step
from support.ranks import DEVICE_VARIABLE, run_ranks, visible_gpus
from support.sharded import check_near, twins, weights_of
from support.training import (
    Branches,
    NormNet,
    batches,
    check_close,
    check_equal,
    check_ranks_equal,
    check_tensor_on_ranks,
    engine_of,
    loss_of,
    message_of,
    mlp,
    momentum,
    torch_ddp,
    train,
    wrap_with,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bagua.torch_api as bagua
from bagua.codecs import codec_names, get_codec
from bagua.collectives.object_collectives import all_gather_object, broadcast_object
from bagua.comm_hooks import ByteGradState, bytegrad
from bagua.fsdp import compress_communication
from bagua.torch_api import communication
from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.checkpoint import async_save_checkpoint, load_checkpoint, save_checkpoint
from bagua.torch_api.contrib import fuse_optimizer
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from bagua.torch_api.sharded_replicas import exchange_shards

RANKS = 2
STEPS = 8
TIMEOUT = datetime.timedelta(seconds=60)
# Of how far training went: what algorithms that are not an all-reduce of gradients may be away from torch's DDP.
SHARE = 0.5

ALGORITHMS = (*CASES, Case("diloco", {"sync_every": 2, "outer_optimizer": outer_sgd}))

Section = Callable[[int, torch.device, str], None]
SECTIONS: dict[str, Section] = {}
# In groups that they make by themselves.
OWN_GROUPS: dict[str, Section] = {}
# These use other GPUs: torch decides on which FSDP2 begins, and the codecs are tried on all.
USE_OTHERS = ("FSDP2", "shards of replicas", "codecs")


def _section(name: str, sections: dict[str, Section] = SECTIONS) -> Callable[[Section], Section]:
    def add(section: Section) -> Section:
        sections[name] = section
        return section

    return add


# --- wrapping --------------------------------------------------------------------------------------------------------


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1).double() for one in module.parameters()])


def _trains_as_torch(case: Case, how: str, rank: int, device: torch.device) -> None:
    ours = mlp(rank, device)
    theirs = copy.deepcopy(ours)
    reference = torch_ddp(theirs)
    optimizer, other = case.optimizer(ours), case.optimizer(theirs)
    start = _flat(theirs)
    model = case.wrap(ours, optimizer, how)
    if device.type == "cuda":
        assert engine_of(model).communicator.gpu == device
    for batch in pulling(rank, STEPS, device):
        step(model, optimizer, batch)
        step(reference, other, batch)
    case.stop(model)
    if case.equal:
        check_ranks_equal(ours)
    if case.name == "gradient_allreduce":
        check_equal(ours, theirs)
        return
    mean = _flat(ours)
    dist.all_reduce(mean)
    away = (mean / RANKS - _flat(theirs)).norm().item()
    went = (start - _flat(theirs)).norm().item()
    assert away < SHARE * went, f"{away} away from torch's DDP, which went {went}"


def _add_algorithms() -> None:
    for case in ALGORITHMS:
        for how in ("with_bagua", "wrapper"):

            def section(rank: int, device: torch.device, _: str, case: Case = case, how: str = how) -> None:
                _trains_as_torch(case, how, rank, device)

            SECTIONS[f"{case}, {how}"] = section


_add_algorithms()


@_section("buffers")
def _buffers(rank: int, device: torch.device, _: str) -> None:
    ours = NormNet().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = momentum(ours), momentum(theirs)
    model = wrap_with("wrapper", ours, [optimizer], GradientAllReduceAlgorithm())
    reference = torch_ddp(theirs)
    for number, batch in enumerate(batches(rank, STEPS, device)):
        if number == 2:  # on all ranks: a digest of the next messages says so
            for net in (ours, theirs):
                net.register_buffer("late", torch.full((3,), float(rank), device=device))
        train(model, optimizer, [batch])
        train(reference, other, [batch])
    model(batches(rank, 1, device)[0][0])
    model(batches(rank, 1, device)[0][0])
    assert ours.late.tolist() == [0.0] * 3  # type: ignore[union-attr, operator]
    for name, one in ours.named_parameters():
        assert torch.allclose(one, dict(theirs.named_parameters())[name], rtol=1e-4, atol=1e-5), name


@_section("unused parameters")
def _unused(rank: int, device: torch.device, _: str) -> None:
    ours = Branches().to(device)
    theirs = copy.deepcopy(ours)
    optimizer, other = momentum(ours), momentum(theirs)
    model = wrap_with("wrapper finding unused", ours, [optimizer], GradientAllReduceAlgorithm())
    reference = torch_ddp(theirs, find_unused_parameters=True)
    for batch in batches(rank, 4, device):
        for net, its in ((model, optimizer), (reference, other)):
            its.zero_grad()
            loss_of(net, batch, take=("left", "right")[rank : rank + 1]).backward()
            its.step()
    check_close(ours, theirs)


@_section("states of optimizers")
def _states(rank: int, device: torch.device, _: str) -> None:
    """Adam counts its steps in tensors on the CPU, which a group of NCCL alone cannot carry."""
    net: Any = mlp(rank, device)
    optimizer = torch.optim.Adam(net.parameters())
    if rank == 0:
        train(net, optimizer, batches(rank, 3, device))
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    assert len(optimizer.state) == len(list(net.parameters()))
    for state in optimizer.state.values():
        for name, value in state.items():
            assert name == "step" or value.device == device
            check_tensor_on_ranks(value.to(device), name)


@_section("modules that differ")
def _differ(rank: int, device: torch.device, _: str) -> None:
    net: Any = nn.Linear(3, 3 + rank).to(device)
    message_of(RuntimeError, lambda: net.with_bagua([momentum(net)]), "The ranks have different parameters", "rank 1")


@_section("tuning")
def _tuning(rank: int, device: torch.device, folder: str) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    net: Any = mlp(rank, device)
    optimizer = momentum(net)
    bagua.with_bagua(net, [optimizer], autotune=True)
    train(net, optimizer, batches(rank, 40, device))
    check_ranks_equal(net)


@_section("synchronized batch normalization")
def _sync_batchnorm(rank: int, device: torch.device, _: str) -> None:
    net: Any = SyncBatchNorm.convert_sync_batchnorm(NormNet()).to(device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    train(net, optimizer, batches(rank, 4, device))
    check_ranks_equal(net)


@_section("hook of torch's DDP")
def _hook(rank: int, device: torch.device, _: str) -> None:
    net = mlp(rank, device)
    model = torch_ddp(net)
    model.register_comm_hook(ByteGradState(), bytegrad)
    start = _flat(net)
    train(model, momentum(net), batches(rank, 4, device))
    check_ranks_equal(net)
    assert not torch.equal(_flat(net), start)


# --- without tensors of the module -----------------------------------------------------------------------------------


@_section("objects and barriers")
def _objects(rank: int, device: torch.device, _: str) -> None:
    net: Any = mlp(rank, device)
    net.with_bagua([momentum(net)], GradientAllReduceAlgorithm())
    communicator = net.bagua_ddp.communicator
    assert broadcast_object({"rank": rank}, 1, communicator) == {"rank": 1}
    assert all_gather_object(["x"] * rank, communicator) == [[], ["x"]]
    # A barrier waits for the GPU of the module as well.
    values = torch.ones(1 << 20, device=device)
    for _ in range(20):
        dist.all_reduce(values)
    communicator.barrier()
    if device.type == "cuda":
        assert torch.cuda.current_stream(device).query()  # type: ignore[no-untyped-call]
        assert communicator.cuda_stream.device == device
    # Without a module: the current device.
    with _current(device):
        bagua.init_process_group()
        communication.barrier()
        assert communication.broadcast_object(rank, 0) == 0


@_section("utilities of Lightning")
def _lightning(rank: int, device: torch.device, _: str) -> None:
    if importlib.util.find_spec("lightning") is None:
        return
    from bagua.lightning.utilities import gather_all_tensors, sync_ddp

    found = gather_all_tensors(torch.full((rank + 1,), float(rank), device=device))
    assert [one.tolist() for one in found] == [[0.0], [1.0, 1.0]]
    assert sync_ddp(torch.tensor(float(rank), device=device)).item() == 1.0


# --- around the training loop ----------------------------------------------------------------------------------------


@_section("checkpoints")
def _checkpoints(rank: int, device: torch.device, folder: str) -> None:
    data = batches(rank, 6, device)
    net: Any = mlp(rank, device)
    optimizer = torch.optim.Adam(net.parameters())
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    train(net, optimizer, data[:2])
    save_checkpoint(2, f"{folder}/saved", net, optimizer)
    train(net, optimizer, data[2:4])
    pending = async_save_checkpoint(4, f"{folder}/saved", net, optimizer)
    train(net, optimizer, data[4:])
    pending.wait()
    for iteration in (4, 2):
        other: Any = mlp(rank + 7, device)
        its = torch.optim.Adam(other.parameters())
        other.with_bagua([its], GradientAllReduceAlgorithm())
        assert load_checkpoint(f"{folder}/saved", other, its, iteration=iteration) == iteration
        train(other, its, data[iteration:])
        check_equal(other, net, f"from {iteration}")


@_section("fused optimizer")
def _fused(rank: int, device: torch.device, _: str) -> None:
    ours: Any = mlp(rank, device)
    theirs = copy.deepcopy(ours)
    optimizer: Any = fuse_optimizer(torch.optim.Adam(ours.parameters(), lr=0.01), do_flatten=True)
    other = torch.optim.Adam(theirs.parameters(), lr=0.01)
    ours.with_bagua([optimizer], GradientAllReduceAlgorithm(), do_flatten=False)
    reference = torch_ddp(theirs)
    for batch in batches(rank, 5, device):
        optimizer.zero_grad()
        loss_of(ours, batch).backward()
        optimizer.fuse_step()
        train(reference, other, [batch])
    check_close(ours, theirs, tolerance=1e-4)


@_section("FSDP2")
def _fsdp(rank: int, device: torch.device, _: str) -> None:
    """FSDP2 trains on the current GPU, as torch documents. What Bagua adds to it finds its device by itself."""
    with _current(device):
        ours, plain = twins(device)
    compress_communication(ours, "int8", weights="int8", error_feedback=True)
    with _current(device):
        for batch in batches(rank, 3, device):
            for model in (ours, plain):
                loss_of(model, batch).backward()
                with torch.no_grad():
                    for one in model.parameters():
                        one.sub_(one.grad, alpha=0.05)
                        one.grad = None
        check_near(weights_of(ours), weights_of(plain), 0.1, "weights")


@_section("shards of replicas")
def _shards(rank: int, device: torch.device, _: str) -> None:
    with _current(device):
        mesh = init_device_mesh(device.type, (RANKS, 1), mesh_dim_names=("replicate", "shard"))
        model: Any = fully_shard(mlp(rank, device), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    exchange = exchange_shards(
        model, [optimizer], Algorithm.init("local_sgd", sync_every=2), mesh.get_group("replicate")
    )
    with _current(device):
        train(model, optimizer, batches(rank, 4, device))
    assert exchange.rounds == 2
    for one in model.parameters():
        check_tensor_on_ranks(one.detach().to_local(), "a shard")


# --- on all GPUs ------------------------------------------------------------------------------------------------------


@_section("codecs")
def _codecs(_rank: int, device: torch.device, _: str) -> None:
    """The bytes of the CPU, also where an earlier launch was on another GPU."""
    others = [torch.device("cuda", number) for number in range(RANKS)] if device.type == "cuda" else [device]
    for name in codec_names():
        codec = get_codec(name)
        source = torch.randn(7 * 1024 + 5, generator=torch.Generator().manual_seed(3))
        packed = codec.compress(source)
        decoded = codec.decompress(packed, torch.empty_like(source))
        total = codec.decompress_reduce_compress(torch.cat([packed, packed]), source.numel(), True)
        for there in (*others, *others):
            found = codec.compress(source.to(there))
            assert found.device == there
            assert torch.equal(found.cpu(), packed), f"{name} on {there}"
            back = codec.decompress(found, torch.empty_like(source, device=there))
            assert torch.equal(back.cpu(), decoded), f"{name} on {there}"
            both = codec.decompress_reduce_compress(torch.cat([found, found]), source.numel(), True)
            assert torch.equal(both.cpu(), total), f"{name} on {there}"


# --- groups of their own ---------------------------------------------------------------------------------------------


@_section("Bagua's own group", OWN_GROUPS)
def _own_group(rank: int, device: torch.device, _: str) -> None:
    """Of gloo and NCCL."""
    bagua.init_process_group(timeout=TIMEOUT)
    for case in (CASES[0], CASES[6]):
        _trains_as_torch(case, "with_bagua", rank, device)


@_section("a group that is bound to the GPU of another rank's module", OWN_GROUPS)
def _bound(rank: int, device: torch.device, folder: str) -> None:
    if device.type != "cuda":
        return
    other = torch.device("cuda", 1 - rank)
    _begin("cpu:gloo,cuda:nccl", f"{folder}/bound", rank, device_id=device)
    for wrap in (
        lambda net: net.with_bagua([momentum(net)]),
        lambda net: wrap_with("wrapper", net, [], GradientAllReduceAlgorithm()),
    ):
        net: Any = mlp(rank, other)
        message = message_of(ValueError, lambda wrap=wrap, net=net: wrap(net))
        lines = message.splitlines()
        assert lines[0] == (
            f"Sequential is on {other}, and its process group is bound to {device}, on which alone NCCL communicates."
        )
        assert f"device_id=torch.device('{other}')" in lines[2]
    # Those that are right.
    for place in (device, torch.device("cpu")):
        net = mlp(rank, place)
        optimizer = momentum(net)
        net.with_bagua([optimizer], GradientAllReduceAlgorithm())
        train(net, optimizer, batches(rank, 2, place))
        check_tensor_on_ranks(_flat(net).to(device), f"on {place}")
    _end()
    # What belongs to no module is done on the bound GPU, where NCCL has to carry it.
    _begin("nccl", f"{folder}/bound alone", rank, device_id=device)
    bagua.init_process_group()
    assert communication.broadcast_object(rank, 1) == 1
    communication.barrier()
    _trains_as_torch(CASES[0], "with_bagua", rank, device)


# --- the ranks -------------------------------------------------------------------------------------------------------


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _begin(backend: str, path: str, rank: int, **options: Any) -> None:
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=RANKS, timeout=TIMEOUT, **options
    )


def _end() -> None:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _first_gpu_is_used() -> bool:
    time.sleep(0.2)  # torch's watchdog looks at the communication ten times in a second
    return bool(torch._C._cuda_hasPrimaryContext(0))  # type: ignore[attr-defined]


def _run_sections(folder: str) -> list[tuple[str, str]]:
    """(section, what was wrong), in order. A section that fails on one rank ends on both, and the next one has a new
    group."""
    rank = int(os.environ["RANK"])
    is_on_gpus = os.environ.get(DEVICE_VARIABLE, "cpu") == "cuda"
    device = torch.device("cuda", rank) if is_on_gpus else torch.device("cpu")
    told = dist.FileStore(f"{folder}/told", RANKS)
    results = []

    def run(name: str, section: Section) -> bool:
        problem = ""
        own = Path(folder, "".join(letter if letter.isalnum() else "-" for letter in name))
        own.mkdir(exist_ok=True)
        try:
            section(rank, device, str(own))
            if is_on_gpus:
                torch.cuda.synchronize(device)
                assert torch.cuda.current_device() == 0, "it has changed the current device"
        except Exception:
            problem = traceback.format_exc()
        results.append((name, problem))
        told.set(f"{name} on {rank}", problem or "right")
        told.wait([f"{name} on {one}" for one in range(RANKS)], TIMEOUT)
        return all(told.get(f"{name} on {one}") == b"right" for one in range(RANKS))

    def train_as_torch_does(rank: int, device: torch.device, _: str) -> None:
        net = mlp(rank, device)
        train(torch_ddp(net), momentum(net), batches(rank, 2, device))

    backend = "nccl" if is_on_gpus else "gloo"
    _begin(backend, f"{folder}/store", rank)
    run("torch's DDP alone", train_as_torch_does)
    # Memory of a GPU that this rank does not train on: torch's DDP takes none, and no more does Bagua.
    was_used = is_on_gpus and rank and _first_gpu_is_used()
    for number, (name, section) in enumerate(SECTIONS.items()):
        is_right = run(name, section)
        if is_on_gpus and rank and not was_used and _first_gpu_is_used():
            was_used = True
            if name not in USE_OTHERS:
                results.append((f"{name}: memory", "rank 1 has begun to use GPU 0"))
        if not is_right:
            _end()
            _begin(backend, f"{folder}/store {number}", rank)
    _end()
    for name, section in OWN_GROUPS.items():
        run(name, section)
        _end()
    return results


def test_every_algorithm_is_here() -> None:
    assert {case.name for case in ALGORITHMS} == set(GlobalAlgorithmRegistry)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(290)
def test_all_is_done_on_the_device_of_the_module(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(visible_gpus()) < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, one per rank; here are {len(visible_gpus())}")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    # A program that uses NVLink multicast can harm other users of the host's GPUs.
    environment = {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    by_rank = run_ranks(RANKS, _run_sections, str(tmp_path), timeout=270, env=environment)
    for name in dict.fromkeys(name for results in by_rank for name, _ in results):
        with subtests.test(name):
            problems = [
                f"rank {rank}: {text}" for rank, results in enumerate(by_rank) for one, text in results if one == name
            ]
            wrong = [text for text in problems if not text.endswith(": ")]
            assert not wrong, "\n".join(wrong)
