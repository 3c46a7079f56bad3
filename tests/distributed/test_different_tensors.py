"""Ranks that pass tensors of different dtypes or sizes to the same collective are told, before gloo mixes them up or
ends their processes. Where ranks differ rightly, nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks

import bagua.torch_api as bagua
from bagua.collectives.communicator import COMPARED
from bagua.collectives.object_collectives import all_gather_object
from bagua.job.deadlock import OperationOrder
from bagua.torch_api.communication import broadcast_object, new_group

RANKS = 2

# What a rank calls -> what it says of itself.
DIFFERENT: list[tuple[Callable[[int, Any], Any], str, str]] = [
    (
        lambda rank, comm: bagua.allreduce_inplace(
            torch.ones(10, dtype=(torch.float32, torch.float64)[rank]), comm=comm
        ),
        "all_reduce of 10 float32",
        "all_reduce of 10 float64",
    ),
    (
        # As many bytes: gloo would add up what is not of the same kind.
        lambda rank, comm: bagua.allreduce_inplace(torch.ones(10, dtype=(torch.float32, torch.int32)[rank]), comm=comm),
        "all_reduce of 10 float32",
        "all_reduce of 10 int32",
    ),
    (
        lambda rank, comm: bagua.allreduce_inplace(torch.ones(10 + rank), comm=comm),
        "all_reduce of 10 float32",
        "all_reduce of 11 float32",
    ),
    (
        lambda rank, comm: bagua.broadcast(torch.ones(10 + rank), comm=comm),
        "broadcast of 10 float32",
        "broadcast of 11 float32",
    ),
    (
        lambda rank, comm: bagua.allgather(torch.ones(4 + rank), torch.ones(2 * (4 + rank)), comm),
        "all_gather of 4 float32",
        "all_gather of 5 float32",
    ),
    (
        lambda rank, comm: bagua.alltoall_inplace(torch.ones(10 + 2 * rank), comm),
        "all_to_all of 10 float32",
        "all_to_all of 12 float32",
    ),
    (
        lambda rank, comm: bagua.barrier(comm) if rank == 0 else bagua.allreduce_inplace(torch.ones(3), comm=comm),
        "barrier",
        "all_reduce of 3 float32",
    ),
]


@on_ranks(RANKS)
def test_the_first_collectives_are_compared(rank: int) -> None:
    comm = new_group(list(range(RANKS))).get_global_communicator()
    for call, first, second in DIFFERENT:
        with pytest.raises(ValueError, match="call different collectives") as caught:
            call(rank, comm)
        assert str(caught.value).startswith(f"The ranks call different collectives: rank 0 {first}, rank 1 {second}.")
    # Nothing was sent, so that the group goes on.
    bagua.allreduce_inplace(total := torch.ones(2), bagua.ReduceOp.SUM, comm)
    assert total.tolist() == [2.0, 2.0]


@on_ranks(RANKS)
def test_what_may_differ_is_not_compared(rank: int) -> None:
    comm = new_group(list(range(RANKS))).get_global_communicator()
    # Each rank sends itself one element; rank 0 sends three to rank 1, and gets one.
    sent, received = (([1, 3], [1, 1]), ([1, 1], [3, 1]))[rank]
    receive = torch.zeros(sum(received))
    bagua.alltoall_v(torch.full((sum(sent),), rank + 1.0), sent, [0, 1], receive, received, [0, received[0]], comm)
    assert receive.tolist() == ([1.0, 2.0], [1.0, 1.0, 1.0, 2.0])[rank]
    assert broadcast_object("x" * (1 + 100 * rank), 1, comm) == "x" * 101
    assert all_gather_object("x" * (1 + 100 * rank), comm) == ["x", "x" * 101]
    # Roots have more than others.
    whole = torch.zeros(2 * RANKS) if rank == 0 else torch.ones(2)
    bagua.gather_inplace(whole, 2, 0, comm)
    if rank == 1:
        bagua.gather(torch.ones(2), torch.zeros(0), 0, comm)
    else:
        bagua.gather_inplace(whole, 2, 0, comm)
        assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]


@on_ranks(RANKS)
def test_later_collectives_cost_nothing_more() -> None:
    comm = new_group(list(range(RANKS))).get_global_communicator()
    for _ in range(COMPARED):
        bagua.allreduce_inplace(torch.ones(3), comm=comm)
    begun, calls = comm.operations.begun, []
    original = dist.all_reduce

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(0)
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        bagua.allreduce_inplace(torch.ones(3), comm=comm)
        bagua.barrier(comm)
    assert (len(calls), comm.operations.begun - begun) == (2, 2)


def test_operations_on_other_tensors_are_others() -> None:
    orders = []
    for size, dtype in ((10, torch.float32), (10, torch.float64), (11, torch.float32), (10, torch.float32)):
        order = OperationOrder("group/global")
        order.begin(("all_reduce", size, dtype))
        orders.append(order.log(0, 1).digests)
    assert len(set(orders)) == 3
    assert orders[0] == orders[3]
