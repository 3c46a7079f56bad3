"""Checkpoints of several ranks: what is saved by whom, on how many ranks it is loaded, and ranks that fail. Also those
of models that are compiled, in other wrappers, or in other modules: all that trains is saved, under names that do not
depend on them."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.algorithm_cases import CASES, Case, pulling, step
from support.dying_rank import VICTIM, begin_to_lose_one
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import (
    batches,
    begin,
    check_equal,
    check_ranks_equal,
    engine_of,
    loss_of,
    message_of,
    mlp,
    momentum,
    with_algorithm,
)
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.contrib.checkpoint import durable_files
from bagua.job.failure_report import CollectiveError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.checkpoint import async_save_checkpoint, load_checkpoint, save_checkpoint
from bagua.torch_api.data_parallel import DistributedDataParallel

STEPS = 4
AFTER = 5  # enough for shift_one to meet all partners
DIFFERING = Case("decentralized", {"hierarchical": False})


def _made(case: Case, rank: int, device: torch.device, how: str, seed: int = 0) -> tuple[Any, Any]:
    net = mlp(seed + rank, device)
    optimizer = case.optimizer(net)
    return case.wrap(net, optimizer, how), optimizer


def _everything(model: Any, optimizer: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value.detach().cpu().clone())
        elif isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, list | tuple):
            for one in value:
                walk(one)

    walk([model.state_dict(), optimizer.state_dict(), engine_of(model).state_dict()])
    return found


@pytest.mark.parametrize("how", rest_is_deep(["with_bagua", "wrapper"], 0))
@on_ranks(2)
def test_each_algorithm_goes_on_bit_for_bit(rank: int, device: torch.device, how: str, tmp_path: Path) -> None:
    cases = [case for case in CASES if case.deterministic]
    folder = str(tmp_path)
    for case in cases:
        path = Path(folder, str(case))
        model, optimizer = _made(case, rank, device, how)
        data = pulling(rank, STEPS + AFTER, device)
        for batch in data[:STEPS]:
            step(model, optimizer, batch)
        pending = async_save_checkpoint(STEPS, path, model, optimizer)
        for batch in data[STEPS:]:
            step(model, optimizer, batch)
        pending.wait()
        expected = _everything(model, optimizer)
        # By its own parameters, and the state that an optimizer has before its first step.
        model, optimizer = _made(case, rank, device, how, seed=50)
        assert load_checkpoint(path, model, optimizer) == STEPS
        for batch in data[STEPS:]:
            step(model, optimizer, batch)
        for one, other in zip(expected, _everything(model, optimizer), strict=True):
            assert torch.equal(one, other), str(case)
        files = sorted(one.name for one in (path / "iter_0000004").iterdir())
        assert files == [
            durable_files.MODEL_FILE,
            *([] if case.equal and not case.own_state else [durable_files.replica_file(1)]),
        ], str(case)
        # Before the files of the next case: ranks clear the folder alike.
        bagua.barrier()


@on_ranks(2)
def test_each_rank_of_async_has_its_own(rank: int, device: torch.device, tmp_path: Path) -> None:
    path = str(tmp_path)
    case = Case("async", {"sync_interval_ms": 0})
    model, optimizer = _made(case, rank, device, "with_bagua")
    for batch in pulling(rank, STEPS, device):
        step(model, optimizer, batch)
    own = model[0].weight.detach().clone()
    save_checkpoint(STEPS, path, model, optimizer)  # while a thread averages
    model.bagua_algorithm.abort(model)
    model, optimizer = _made(case, rank, device, "with_bagua", seed=50)
    assert load_checkpoint(path, model, optimizer) == STEPS
    assert torch.equal(model[0].weight, own)
    model.bagua_algorithm.abort(model)


@on_ranks(2)
def test_an_exchange_that_is_owed_comes_first(rank: int, device: torch.device, tmp_path: Path) -> None:
    """A rank that skipped its step, as a GradScaler does, owes its neighbor an exchange, who waits for it in step()."""
    path = str(tmp_path)
    case = Case("low_precision_decentralized", {"hierarchical": False})
    group = bagua.communication.new_group()  # in which no checkpoint was saved before
    net = mlp(rank, device)
    optimizer = case.optimizer(net)
    model = case.wrap(net, optimizer, group=group)
    loss_of(model, pulling(rank, 1, device)[0]).backward()
    if rank == 0:
        optimizer.step()
    save_checkpoint(1, path, model, optimizer)
    assert load_checkpoint(path, model, optimizer) == 1


@on_ranks(3)
def test_ranks_of_a_group_save_together(rank: int, device: torch.device, tmp_path: Path) -> None:
    path = str(tmp_path)
    group = bagua.communication.new_group([0, 2])
    if rank != 1:
        net = mlp(rank, device)
        model = DIFFERING.wrap(net, momentum(net), group=group)
        own = [value.clone() for value in net.state_dict().values()]
        save_checkpoint(1, path, model)
        for value in net.state_dict().values():
            value.mul_(2)
        assert load_checkpoint(path, model) == 1
        assert all(torch.equal(one, two) for one, two in zip(own, net.state_dict().values(), strict=True))


# --- other numbers of ranks, other algorithms ------------------------------------------------------------------------


def _save(case: Case, path: str) -> list[torch.Tensor]:
    rank, device = begin()
    model, optimizer = _made(case, rank, device, "with_bagua")
    for batch in pulling(rank, STEPS, device):
        step(model, optimizer, batch)
    save_checkpoint(STEPS, path, model, optimizer)
    return [value.cpu() for value in model.state_dict().values()]


def _load_before_wrapping(path: str, expected: list[torch.Tensor], average_replicas: bool) -> None:
    rank, device = begin()
    model = mlp(50 + rank, device)
    optimizer = DIFFERING.optimizer(model)
    assert load_checkpoint(path, model, optimizer, average_replicas=average_replicas) == STEPS
    for value, one in zip(model.state_dict().values(), expected, strict=True):
        torch.testing.assert_close(value.cpu(), one)
    check_ranks_equal(model)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
    step(with_algorithm(model, optimizer), optimizer, pulling(rank, 1, device)[0])


@pytest.mark.parametrize("size", [1, 3])
def test_equal_replicas_are_loaded_on_any_number_of_ranks(size: int, tmp_path: Path) -> None:
    expected = run_ranks(2, _save, Case("gradient_allreduce"), str(tmp_path), reuse=True)[0]
    run_ranks(size, _load_before_wrapping, str(tmp_path), expected, False, reuse=True)


def _refused(path: str, reason: str, how: str | None) -> None:
    rank, device = begin()
    model: Any = mlp(50 + rank, device)
    optimizer = momentum(model)
    if how is not None:
        Case(how).wrap(model, optimizer)
    before = [value.clone() for value in model.state_dict().values()]
    told = message_of(RuntimeError, lambda: load_checkpoint(path, model, optimizer))
    assert reason in told, told
    assert "Rank 0" in told or how is None
    assert all(torch.equal(one, two) for one, two in zip(before, model.state_dict().values(), strict=True))


def test_replicas_that_differ_are_loaded_as_they_were_or_as_their_mean(tmp_path: Path) -> None:
    path = str(tmp_path / "differ")
    states = run_ranks(2, _save, DIFFERING, path, reuse=True)
    assert not torch.equal(states[0][0], states[1][0])
    run_ranks(2, _refused, path, "average_replicas=True", None, reuse=True)
    run_ranks(2, _refused, path, "and here is gradient_allreduce", "gradient_allreduce", reuse=True)
    equal = str(tmp_path / "equal")
    run_ranks(2, _save, Case("gradient_allreduce"), equal, reuse=True)
    run_ranks(2, _refused, equal, "load it before wrapping the model", "decentralized", reuse=True)
    run_ranks(3, _refused, path, "a state for each of 2 ranks, and here are 3", "decentralized", reuse=True)
    mean = [(one + other) / 2 for one, other in zip(*states, strict=True)]
    run_ranks(3, _load_before_wrapping, path, mean, True, reuse=True)


# --- ranks that fail -------------------------------------------------------------------------------------------------


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@on_ranks(2)
def test_ranks_that_cannot_are_named_on_all(rank: int, device: torch.device, tmp_path: Path) -> None:
    path = str(tmp_path)
    net = mlp(rank, device)
    model = with_algorithm(net, momentum(net))
    save_checkpoint(1, path, model, per_rank=True)
    write, begin_writing = durable_files.write_state, durable_files.begin

    # One rank's disk is full, in the foreground and in the background.
    if rank == 1:
        durable_files.write_state = _full
    for call in (save_checkpoint, lambda *arguments, **options: async_save_checkpoint(*arguments, **options).wait()):
        told = message_of(RuntimeError, lambda: call(2, path, model, per_rank=True))  # noqa: B023
        assert told.startswith("Rank 1 (host "), told
        assert "could not write checkpoint 2: OSError: [Errno 28] No space left on device" in told
        assert "the latest checkpoint in" in told
    durable_files.write_state = write

    # Rank 0 cannot make the folder.
    if rank == 0:
        durable_files.begin = _full
    assert "Rank 0 (host" in message_of(RuntimeError, lambda: save_checkpoint(2, path, model))
    durable_files.begin = begin_writing

    # An error of the states of one rank.
    class Broken:
        def state_dict(self) -> Any:
            return 1 / rank

    told = message_of(RuntimeError, lambda: async_save_checkpoint(2, path, model, Broken()).wait())
    assert "Rank 0" in told, told
    assert "ZeroDivisionError" in told, told

    assert "[2, 3]" in message_of(ValueError, lambda: save_checkpoint(2 + rank, path, model))
    dist.barrier()
    assert durable_files.saved_iterations(Path(path)) == [1]
    assert sorted(one.name for one in Path(path).iterdir()) == ["iter_0000001", durable_files.LATEST_FILE]

    # A file that one rank cannot read.
    if rank == 1:
        Path(path, "iter_0000001", durable_files.replica_file(1)).unlink()
    dist.barrier()
    before = [value.clone() for value in net.state_dict().values()]
    told = message_of(RuntimeError, lambda: load_checkpoint(path, model))
    assert told.startswith("Rank 1 (host "), told
    assert durable_files.replica_file(1) in told, told
    assert all(torch.equal(one, two) for one, two in zip(before, net.state_dict().values(), strict=True))


@on_ranks(2)
def test_shards_are_refused_before_anything_is_written(rank: int, device: torch.device, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    path = tmp_path / "sharded"
    mesh = init_device_mesh(device.type, (2,))
    sharded: Any = fully_shard(mlp(0, device), mesh=mesh)
    whole = mlp(0, device)
    optimizer = torch.optim.Adam(sharded.parameters())
    sharded(torch.ones(2, 2, device=device)).sum().backward()
    optimizer.step()

    def check(call: Any, name: str) -> None:
        told = message_of(RuntimeError, call)
        assert f"ValueError: {name} is a DTensor: torch distributes it over the ranks" in told, told
        assert "with torch.distributed.checkpoint; see docs/how-to/train/use-fsdp.md" in told, told

    check(lambda: save_checkpoint(1, path, sharded), "'0.weight'")
    check(lambda: save_checkpoint(1, path, nn.ModuleDict({"net": sharded}), per_rank=True), "'net.0.weight'")
    check(lambda: async_save_checkpoint(1, path, torch.compile(sharded)).wait(), "'0.weight'")
    check(lambda: save_checkpoint(1, path, whole, optimizer if rank == 1 else None), "'Adam.state.0.exp_avg'")
    unused = torch.optim.SGD(sharded.parameters())
    check(lambda: save_checkpoint(1, path, whole, unused), "'parameter 0 of SGD'")
    assert not path.exists()
    # What an earlier version wrote, and models and optimizers that a whole file would be loaded into.
    save_checkpoint(1, path, whole, torch.optim.Adam(whole.parameters()))
    check(lambda: load_checkpoint(path, sharded), "'0.weight'")
    check(lambda: load_checkpoint(path, whole, optimizer), "'parameter 0 of Adam'")
    if rank == 0:
        file = path / "iter_0000001" / durable_files.MODEL_FILE
        torch.save({**torch.load(file), "model": sharded.state_dict()}, file)
    dist.barrier()
    check(lambda: load_checkpoint(path, whole), "'model.0.weight'")

    # The state of FSDP1's model is whole, its optimizer's is not.
    warnings.simplefilter("ignore")
    former, other = (FullyShardedDataParallel(mlp(seed, device), device_id=device) for seed in (3, 4))
    told = message_of(RuntimeError, partial(save_checkpoint, 2, path, former, torch.optim.SGD(former.parameters())))
    assert "'parameter 0 of SGD' is a parameter of FullyShardedDataParallel" in told
    save_checkpoint(2, path, former)
    assert load_checkpoint(path, other) == 2
    assert all(map(torch.equal, former.state_dict().values(), other.state_dict().values()))


def _killed(path: str, in_background: bool) -> tuple[int, ...]:
    rank, device = begin_to_lose_one()
    net = mlp(rank, device)
    model = with_algorithm(net, momentum(net))
    save_checkpoint(1, path, model, per_rank=True)
    write = durable_files.write_state

    def die(file: Path, state: Any) -> None:
        write(file, state)
        os.truncate(file, file.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == VICTIM:
        durable_files.write_state = die
    try:
        if in_background:
            async_save_checkpoint(2, path, model, per_rank=True).wait()
        else:
            save_checkpoint(2, path, model, per_rank=True)
    except CollectiveError as error:
        return error.missing_ranks
    raise AssertionError("saved without the rank that died")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_rank_that_dies_is_named_and_the_former_checkpoint_stays(in_background: bool, tmp_path: Path) -> None:
    told = run_ranks(3, _killed, str(tmp_path), in_background, expect_death={VICTIM})
    assert told == [(VICTIM,), None, (VICTIM,)]
    assert durable_files.latest_iteration(tmp_path) == 1
    run_ranks(3, _load_what_is_left, str(tmp_path), reuse=True)


def _load_what_is_left(path: str) -> None:
    rank, device = begin()
    net = mlp(50 + rank, device)
    model = with_algorithm(net, momentum(net))
    assert load_checkpoint(path, model) == 1
    reference = mlp(0, device)
    check_equal(net, reference)
    save_checkpoint(2, path, model)
    assert sorted(one.name for one in Path(path).iterdir()) == [
        "iter_0000001",
        "iter_0000002",
        durable_files.LATEST_FILE,
    ]


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")  # nothing is compiled before the first call


def _algorithm() -> Algorithm:
    return Algorithm.init("low_precision_decentralized", hierarchical=False)


def _with_bagua(net: Any) -> Any:
    return net.with_bagua([momentum(net)], _algorithm())


def _parallel(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, optimizers=[momentum(net)], algorithm=_algorithm())


def _with_compiled_child(net: Any) -> Any:
    net[0] = _compiled(net[0])
    return _with_bagua(net)


def _with_parallel_child(net: Any) -> nn.Module:
    return nn.ModuleDict({"net": _compiled(_parallel(net)), "head": nn.Linear(2, 2)})


def _compiled_in_place(net: Any) -> Any:
    net.compile(backend="eager")
    return _with_bagua(net)


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "compiled": lambda net: _compiled(_with_bagua(net)),
    "compiled first": lambda net: _with_bagua(_compiled(net)),
    "compiled in place": _compiled_in_place,
    "parallel": _parallel,
    "parallel of compiled": lambda net: _parallel(_compiled(net)),
    "compiled parallel": lambda net: _compiled(_parallel(net)),
    "compiled child": _with_compiled_child,
    "in another module": lambda net: nn.ModuleDict({"net": _with_bagua(net), "head": nn.Linear(2, 2)}),
    "parallel in another module": _with_parallel_child,
    "two of them": lambda net: nn.ModuleList([_with_bagua(net), _with_bagua(nn.Linear(2, 2).to(net[0].weight))]),
    "a part": lambda net: _with_bagua(net)[0],
}


def _engine(*models: nn.Module) -> Any:
    return next(one.__dict__["bagua_ddp"] for model in models for one in model.modules() if "bagua_ddp" in one.__dict__)


@on_ranks(2)
def test_what_trains_is_saved_whole(rank: int, device: torch.device, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name, wrap in WRAPPED.items():
        path = Path(folder, name)
        net = mlp(3, device)
        model = wrap(net)
        engine = _engine(net, model)
        for inputs, _ in batches(rank, 3, device):
            engine.module(inputs).square().mean().backward()
            engine.bagua_optimizers[0].step()
        save_checkpoint(3, path, model)
        again = mlp(5, device)
        other = wrap(again)
        assert load_checkpoint(path, other) == 3
        for one, loaded in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, loaded), name
        if name != "a part":
            replicas = [
                torch.cat(one.state_dict()["algorithm"]["replicas"][0]) for one in (engine, _engine(again, other))
            ]
            assert torch.equal(*replicas), name
        first = next(iter(net.parameters())).detach().cpu()
        differ: list[Any] = [None, None]
        dist.all_gather_object(differ, first)
        assert not torch.equal(*differ), "or the test shows nothing"
        written = torch.load(path / "iter_0000003" / durable_files.MODEL_FILE, weights_only=True)["model"]
        assert not [key for key in written if "_orig_mod" in key or "module" in key], name


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_names_of_older_files(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    saved = mlp(0, torch.device("cpu"))
    folder = durable_files.folder_of(tmp_path, 1)
    folder.mkdir()
    (tmp_path / durable_files.LATEST_FILE).write_text("1")
    state: dict[str, Tensor] = {f"{prefix}{name}": value for name, value in saved.state_dict().items()}
    torch.save({"iteration": 1, "model": state}, folder / durable_files.MODEL_FILE)
    child = mlp(1, torch.device("cpu"))
    child[0] = _compiled(child[0])
    for model in (mlp(1, torch.device("cpu")), _compiled(mlp(1, torch.device("cpu"))), child):
        assert load_checkpoint(tmp_path, model) == 1
        assert all(map(torch.equal, model.parameters(), saved.parameters()))
