"""How the default group comes to be: from the environment, a store or a torch group; and what is refused."""

from __future__ import annotations

import datetime
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_program import run_programs
from support.rank_tests import on_ranks
from support.ranks import device_for, run_ranks

import bagua.torch_api as bagua
from bagua.collectives.process_group import to_bagua_process_group
from bagua.torch_api import communication


@on_ranks(1, joined=False)
def test_the_import_sets_up_nothing() -> None:
    assert "bagua.torch_api" in sys.modules
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()
    assert torch.get_num_threads() == 1


def from_environment() -> tuple[int, list[int], str]:
    device = device_for(bagua.get_rank())
    assert not communication.is_initialized()
    bagua.init_process_group()
    assert communication.is_initialized()
    tensor = torch.tensor([bagua.get_rank() + 1.0], device=device)
    bagua.allreduce_inplace(tensor)
    again = r"already initialized \(rank \d of 3, backend .*\)\.\n.*second call.*\n.*destroy_process_group.*new_group"
    with pytest.raises(RuntimeError, match=again):
        bagua.init_process_group()
    return int(tensor.item()), communication._get_default_group().ranks, dist.get_backend_config()


def test_from_the_environment() -> None:
    for result, ranks, backends in run_ranks(3, from_environment):
        assert result == 6
        assert ranks == [0, 1, 2]
        assert "cpu:gloo" in backends


def alone() -> float:
    device_for(0)
    bagua.init_process_group()
    tensor = torch.tensor([5.0])
    bagua.allreduce_inplace(tensor)
    bagua.barrier()
    group = communication._get_default_group()
    assert group.get_inter_node_communicator().nranks() == 1
    return tensor.item()


def test_a_process_without_a_launcher_is_alone() -> None:
    empty = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")
    assert run_ranks(1, alone, env=empty) == [5.0]


def from_store(path: str, order: list[int]) -> dict[str, str]:
    """The ranks that the store is told are not those of the environment."""
    rank = order[int(os.environ["RANK"])]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    device_for(rank)
    bagua.init_process_group(dist.FileStore(path, 4), rank, 4, 2)
    assert dist.get_rank() == rank
    group = communication._get_default_group()
    assert group.get_intra_node_communicator().ranks == ((0, 1) if rank < 2 else (2, 3))
    bagua.barrier()
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


def test_from_a_store(tmp_path: Path) -> None:
    order = [2, 0, 3, 1]
    for rank, result in zip(order, run_ranks(4, from_store, str(tmp_path / "store"), order), strict=True):
        assert result == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
        }


@on_ranks(2, joined=False)
def test_on_top_of_torch() -> None:
    device = device_for(bagua.get_rank())
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    world = dist.group.WORLD
    bagua.init_process_group()
    group = communication._get_default_group()
    assert group.torch_group is world
    assert group is communication.from_torch_group(world)
    tensor = torch.ones(1, device=device)
    bagua.allreduce_inplace(tensor)
    assert tensor.item() == 2
    assert communication.broadcast_object({"from": bagua.get_rank()}, 1) == {"from": 1}
    bagua.barrier()


def again(path: str) -> None:
    """After torch was shut down, everything can be set up anew, nodes and all."""
    for attempt in range(3):
        device_for(bagua.get_rank())
        store = dist.FileStore(f"{path}{attempt}", 2)
        bagua.init_process_group(store, bagua.get_rank(), 2, 2)
        group = communication._get_default_group()
        bagua.barrier(group.get_intra_node_communicator())
        bagua.barrier()
        dist.destroy_process_group()
        assert not communication.is_initialized()
        del group
        gc.collect()
        with pytest.raises(RuntimeError, match="not initialized"):
            bagua.barrier()


def test_after_torch_was_shut_down(tmp_path: Path) -> None:
    run_ranks(2, again, str(tmp_path / "store"))


@on_ranks(3, joined=False)
def test_starting_over_on_the_same_port() -> None:
    """Also while the old groups live, as some imports of torch keep them, and if ranks are not equally fast."""
    kept: list[Any] = []
    for attempt in range(4):
        device = device_for(bagua.get_rank())
        bagua.init_process_group()
        tensor = torch.tensor([bagua.get_rank() + attempt], device=device)
        bagua.allreduce_inplace(tensor)
        assert tensor.item() == 3 + 3 * attempt
        bagua.barrier(communication._get_default_group().get_intra_node_communicator())
        kept.append((dist.group.WORLD, communication._get_default_group()) if attempt % 2 else None)
        dist.destroy_process_group()
        gc.collect()
        if bagua.get_rank() == attempt % 3:
            time.sleep(0.2)


def by_torch_alone(path: str) -> None:
    """Then Bagua's default group is that of a world which is gone, even while somebody holds on to its torch group."""
    rank = bagua.get_rank()
    bagua.init_process_group(dist.FileStore(f"{path}0", 2), rank, 2, 2)
    bagua.barrier()
    old = dist.group.WORLD
    dist.destroy_process_group()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{path}1", 2), rank=rank, world_size=2)
    assert not communication.is_initialized()
    assert to_bagua_process_group().torch_group is dist.group.WORLD is not old
    bagua.init_process_group()
    assert communication.is_initialized()
    bagua.barrier()


def test_after_torch_was_set_up_anew(tmp_path: Path) -> None:
    run_ranks(2, by_torch_alone, str(tmp_path / "store"))


def refused(arguments: tuple[int, int, int], with_store: bool, message: str) -> None:
    store = dist.HashStore() if with_store else None
    before = dict(os.environ)
    with pytest.raises(ValueError, match=message):
        bagua.init_process_group(store, *arguments)
    assert dict(os.environ) == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "with_store", "message"),
    [
        ((-1, -1, -1), True, "rank=-1 of world_size=-1"),
        ((0, 2, -1), True, "local_world_size=-1 must be between 1 and world_size=2"),
        ((0, 2, 3), True, "local_world_size=3"),
        ((2, 2, 1), True, "0 <= rank < world_size"),
        ((0, 2, 1), False, "without a store"),
    ],
)
def test_wrong_arguments(arguments: tuple[int, int, int], with_store: bool, message: str) -> None:
    run_ranks(1, refused, arguments, with_store, message)


def test_wrong_environment() -> None:
    run_ranks(1, refused, (-1, -1, -1), False, "MASTER_PORT is not set", env={"WORLD_SIZE": "2", "MASTER_PORT": ""})
    run_ranks(1, refused, (-1, -1, -1), False, "RANK=1 must be between 0", env={"RANK": "1"})
    run_ranks(1, refused, (-1, -1, -1), False, "WORLD_SIZE=two: must be an integer", env={"WORLD_SIZE": "two"})
    run_ranks(1, refused, (-1, -1, -1), False, "MASTER_PORT=http: must be an integer", env={"MASTER_PORT": "http"})
    run_ranks(1, refused, (-1, -1, -1), False, "MASTER_PORT=70000: must be from 1", env={"MASTER_PORT": "70000"})


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_processes_that_know_nothing_of_each_other_are_refused(name: str) -> None:
    unset = {"WORLD_SIZE": "", "MASTER_PORT": "", "RANK": ""}
    message = f"WORLD_SIZE is not set, and {name}=3: so many processes were started, and each would train alone"
    run_ranks(1, refused, (-1, -1, -1), False, message, env={**unset, name: "3"})


@on_ranks(1, joined=False)
def test_a_process_that_is_meant_to_be_alone() -> None:
    os.environ["SLURM_STEP_NUM_TASKS"] = "2"
    os.environ["WORLD_SIZE"] = "1"
    bagua.init_process_group()
    assert bagua.get_world_size() == 1


@on_ranks(1, joined=False)
def test_contradiction_with_torch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="already initialized with rank 0 of 1"):
        bagua.init_process_group(dist.HashStore(), 0, 2, 1)


@pytest.mark.parametrize("timeout", [7.5, datetime.timedelta(seconds=7.5)])
@on_ranks(2, joined=False)
def test_timeout_and_backend(timeout: Any) -> None:
    bagua.init_process_group(timeout=timeout, backend="gloo")
    assert communication._get_default_group().timeout == datetime.timedelta(seconds=7.5)
    assert dist.get_backend() == "gloo"
    bagua.barrier()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout": 0}, ValueError, "timeout=0 must be more than 0 s"),
        ({"timeout": float("nan")}, ValueError, "timeout=nan must be"),
        ({"timeout": datetime.timedelta(seconds=-1)}, ValueError, "must be more than 0 s"),
        ({"timeout": "30s"}, TypeError, "timeout is '30s'. Pass a timedelta or a number of seconds"),
        ({"timeout": True}, TypeError, "timeout is True"),
        ({"backend": "gloob"}, ValueError, "unknown backend 'gloob'. Did you mean 'gloo'\\?"),
        ({"backend": "cpu:gloo,cpu:gloo"}, ValueError, "is malformed"),
        ({"backend": 1}, TypeError, "backend is 1. Pass a string"),
    ],
)
def test_wrong_timeout_or_backend(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bagua.init_process_group(**options)
    assert not dist.is_initialized()


@on_ranks(1, joined=False)
def test_options_do_not_change_the_group_of_torch() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match="timeout and backend cannot be changed"):
        bagua.init_process_group(timeout=5, backend="gloo")


# In place of a thread of gloo's that drops the last tensors: it comes back to Python when the program has ended, in
# the pause that Bagua makes there, whenever that is on a busy machine.
LATE = """
import threading, time
import bagua.torch_api as bagua

bagua.init_process_group()
has_ended = False
paused, through = threading.Event(), threading.Event()

def late():
    paused.wait()
    print("through", flush=True)
    through.set()

def pause(seconds, sleep=time.sleep):
    if not has_ended or threading.current_thread() is not threading.main_thread():
        return sleep(seconds)
    paused.set()
    through.wait()

time.sleep = pause
threading.Thread(target=late, daemon=True).start()
has_ended = True
"""


def test_threads_of_gloo_get_the_interpreter_once_more_at_the_end() -> None:
    (done,) = run_programs(1, LATE)
    assert (done.returncode, done.stdout) == (0, "through\n"), done.stderr
