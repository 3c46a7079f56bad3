"""The collectives as methods of a communicator, called as code for Bagua 0.9 calls them, with backend tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.rank_tests import on_ranks
from torch import Tensor

import bagua.torch_api as bagua
from bagua.legacy.members import CollectiveMethods
from bagua.torch_api import communication
from bagua.torch_api.communication import CommMember, ReduceOp

SUM, MAX = int(ReduceOp.SUM), ReduceOp.MAX
SENT = "what is sent"  # stands for a tensor with two parts, other values on each rank
RECEIVED = "what is received"  # stands for a tensor of zeros, with as many elements as are received


def backend(tensor: Tensor) -> Any:
    return tensor.ensure_bagua_tensor().bagua_backend_tensor()


# Method, its arguments, elements received (0: in place), and the result on ranks 0 and 1; they send (1, 2, 3, 4) and
# (10, 20, 30, 40).
FIRST, SECOND = [1, 2, 3, 4], [10, 20, 30, 40]
CASES: list[tuple[str, tuple[Any, ...], int, tuple[list[int], list[int]]]] = [
    ("broadcast", (SENT, 1), 0, (SECOND, SECOND)),
    ("reduce", (SENT, RECEIVED, 1, SUM), 4, ([0] * 4, [11, 22, 33, 44])),
    ("reduce_inplace", (SENT, 0, MAX), 0, (SECOND, SECOND)),
    ("allreduce", (SENT, RECEIVED, SUM), 4, ([11, 22, 33, 44], [11, 22, 33, 44])),
    ("allreduce_inplace", (SENT, SUM), 0, ([11, 22, 33, 44], [11, 22, 33, 44])),
    ("allgather", (SENT, RECEIVED), 8, (FIRST + SECOND, FIRST + SECOND)),
    ("allgather_inplace", (SENT,), 0, ([1, 2, 30, 40], [1, 2, 30, 40])),
    ("gather", (SENT, RECEIVED, 1), 8, ([0] * 8, FIRST + SECOND)),
    ("scatter", (SENT, RECEIVED, 1), 2, ([10, 20], [30, 40])),
    ("reduce_scatter", (SENT, RECEIVED, SUM), 2, ([11, 22], [33, 44])),
    ("reduce_scatter_inplace", (SENT, SUM), 0, ([11, 22, 3, 4], [33, 44, 30, 40])),
    ("alltoall", (SENT, RECEIVED), 4, ([1, 2, 10, 20], [3, 4, 30, 40])),
    ("alltoall_inplace", (SENT,), 0, ([1, 2, 10, 20], [3, 4, 30, 40])),
    ("alltoall_v", (SENT, [1, 1], [0, 3], RECEIVED, [1, 1], [2, 0]), 3, ([10, 0, 1], [40, 0, 4])),
    ("alltoall_v_inplace", (SENT, [1, 1], [0, 3]), 0, ([1, 2, 3, 10], [4, 20, 30, 40])),
]
ROOTED_INPLACE = {"gather_inplace", "scatter_inplace"}
POINT_TO_POINT = {"send", "recv"}


def test_each_method_has_a_case() -> None:
    methods = {
        name
        for name, one in inspect.getmembers(CollectiveMethods, inspect.isfunction)
        if not name.startswith("_") and name != "device_id"
    }
    assert methods == {case[0] for case in CASES} | ROOTED_INPLACE | POINT_TO_POINT


@on_ranks(2)
def test_each_collective(rank: int, device: torch.device) -> None:
    comm = communication._get_default_group().get_global_communicator()
    streams: list[Callable[[], Any]] = [contextlib.nullcontext]
    if comm.cuda_stream is not None:
        streams.append(lambda: torch.cuda.stream(comm.cuda_stream))
    for use_stream in streams:
        for method, arguments, received, expected in CASES:
            sent = torch.tensor([FIRST, SECOND][rank], dtype=torch.float32, device=device)
            target = torch.zeros(received, device=device) if received else sent
            given = {SENT: sent, RECEIVED: target}
            if comm.cuda_stream is not None:
                comm.cuda_stream.wait_stream(torch.cuda.current_stream())
            with use_stream():
                call = getattr(comm, method)
                call(*[backend(given[one]) if isinstance(one, str) else one for one in arguments])
            if comm.cuda_stream is not None:
                comm.cuda_stream.synchronize()
            assert target.tolist() == expected[rank], (method, use_stream)

        whole = torch.tensor([1.0, 2.0] if rank else [3.0, 0.0, 0.0, 0.0], device=device)
        comm.gather_inplace(backend(whole), 2, 0)
        assert whole.tolist() == ([1, 2] if rank else [3, 0, 1, 2])
        part = torch.tensor([1.0, 2.0, 3.0, 4.0] if rank else [0.0, 0.0], device=device)
        comm.scatter_inplace(backend(part), 2, 1)
        assert part.tolist() == ([1, 2, 3, 4] if rank else [1, 2])
        if rank == 0:
            comm.send(backend(torch.tensor([5.0], device=device)), 1)
        else:
            tensor = torch.zeros(1, device=device)
            comm.recv(backend(tensor), peer_rank=0)
            assert tensor.item() == 5
    comm.barrier()
    assert (comm.rank(), comm.nranks(), comm.check_abort()) == (rank, 2, False)
    assert comm.device_id() == (rank if device.index is None else device.index)


@on_ranks(2)
def test_tensors_and_communicators_that_stand_for_others(rank: int, device: torch.device) -> None:
    world: Any = communication._get_default_group().get_global_communicator()
    # A tensor that stands for another one.
    weight = torch.nn.Parameter(torch.zeros(2, device=device))
    weight.grad = torch.full((2,), rank + 1.0, device=device)
    proxy = weight.ensure_bagua_tensor("weight", getter_closure=lambda parameter: parameter.grad)
    world.allreduce_inplace(proxy.bagua_backend_tensor(), op=ReduceOp.AVG)
    assert weight.grad.tolist() == [1.5, 1.5]
    assert weight.tolist() == [0, 0]

    tensor = torch.full((1,), rank + 1.0, device=device)
    bagua.allreduce_inplace(tensor, comm=CommMember.WORLD)
    assert tensor.item() == 3
    assert not communication._rank_not_in_comm(communication.comm.WORLD)
    assert bagua.communication.broadcast_object(rank, 1, CommMember.WORLD) == 1

    alone: Any = communication.new_group([0]).get_global_communicator()
    if rank == 0:
        alone.allreduce_inplace(backend(tensor), ReduceOp.SUM)
    else:
        for call in (alone.device_id, lambda: alone.allreduce_inplace(backend(tensor), ReduceOp.SUM)):
            with pytest.raises(AttributeError, match="no member"):
                call()
    assert tensor.item() == 3
    with pytest.raises(ValueError, match="must be one of SUM"):
        world.allreduce_inplace(backend(tensor), 77)


@on_ranks(2)
def test_an_aborted_communicator_raises(device: torch.device) -> None:
    comm: Any = communication.new_group().get_global_communicator()
    tensor = torch.ones(1, device=device)
    comm.allreduce_inplace(backend(tensor), ReduceOp.SUM)
    assert tensor.item() == 2
    comm.abort()
    assert comm.check_abort()
    with pytest.raises(RuntimeError, match="aborted"):
        comm.allreduce_inplace(backend(tensor), ReduceOp.SUM)
