"""A rank is gone in the middle of plain collectives: the others say which. Processes: test_failure_report.py."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from support.dying_rank import VICTIM, begin_to_lose_one
from support.rank_tests import on_ranks

import bagua.torch_api as bagua
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.comm_thread import join_thread
from bagua.job import failure_report
from bagua.job.failure_report import CollectiveError, failures_named
from bagua.job.job_thread import current_job_thread
from bagua.job.torch_internals import default_store
from bagua.torch_api import communication
from bagua.torch_api.communication import new_group

MEMBERS = [VICTIM, 2]  # the victim is rank 0 of their group
PART = 1 << 12  # elements
PARTS = [PART] * len(MEMBERS), range(0, len(MEMBERS) * PART, PART)
CALLS_BEFORE_DEATH = 2
CALLS = 10_000  # whoever only sends may succeed for as long as the network takes what it sends
_groups = itertools.count()
Call = Callable[[BaguaCommunicator, torch.Tensor], Any]

# name -> (call with a tensor that has a part for each rank, a pattern of what the error says has failed).
COLLECTIVES: dict[str, tuple[Call, str]] = {
    "allreduce": (lambda comm, whole: bagua.allreduce_inplace(whole, comm=comm), "all_reduce"),
    "allreduce of int16": (
        lambda comm, whole: bagua.allreduce_inplace(whole.short(), comm=comm),
        "all_(reduce|gather)",
    ),
    "allgather": (lambda comm, whole: bagua.allgather_inplace(whole, comm), "all_gather"),
    "broadcast": (lambda comm, whole: bagua.broadcast(whole, 0, comm), "broadcast"),
    "scatter": (lambda comm, whole: bagua.scatter(whole, whole[:PART].clone(), 0, comm), "scatter"),
    "reduce_scatter": (lambda comm, whole: bagua.reduce_scatter_inplace(whole, comm=comm), "reduce_scatter|all_to_all"),
    "alltoall": (lambda comm, whole: bagua.alltoall_inplace(whole, comm), "all_to_all"),
    "alltoall_v": (lambda comm, whole: bagua.alltoall_v_inplace(whole, *PARTS, comm), "all_to_all"),
    "barrier": (lambda comm, _: bagua.barrier(comm), "barrier"),
    "broadcast_object": (lambda comm, _: communication.broadcast_object("object", 0, comm), "broadcast"),
    "allreduce_coalesced": (
        lambda comm, whole: communication.allreduce_coalesced_inplace([whole, whole.double()], comm=comm),
        "all_reduce",
    ),
}


def check_named(call: Callable[[BaguaProcessGroup], Any], what: str, members: list[int] = MEMBERS) -> None:
    """Rank 2 calls until it fails, in a new group, and names the victim, as a rank of the world."""
    rank, group, error = dist.get_rank(), new_group(members), None
    try:
        for number in range(CALLS if rank in MEMBERS else 0):
            if rank == VICTIM and number == CALLS_BEFORE_DEATH:
                # Ends its connections of the group, as its death does. So one start of ranks is enough for all.
                group.get_global_communicator().abort()
                break
            call(group)
    except CollectiveError as raised:
        error = raised
    group_number = next(_groups)
    keys = [f"through {group_number}, {one}" for one in range(dist.get_world_size())]
    default_store().set(keys[rank], b"")
    default_store().wait(keys)
    if rank == 2:
        assert error is not None, "all calls succeeded without the rank that is gone"
        assert error.missing_ranks == (VICTIM,), error
        assert re.search(rf"\nOperation on rank 2: {what} \(group \d+, ranks ", str(error)), error
        assert "gloo" in str(error.__cause__)


@on_ranks(3, joined=False, timeout=200)
def test_survivors_name_the_rank_that_is_gone() -> None:
    rank, device = begin_to_lose_one()
    failure_report.ROLL_CALL_S = 0.3  # real time, which the victim lets pass; nobody else is asked
    whole = torch.ones(len(MEMBERS) * PART, device=device)

    def collective(name: str, group: BaguaProcessGroup) -> None:
        COLLECTIVES[name][0](group.get_global_communicator(), whole)

    def message(of_rank_2: Any, of_victim: Any, group: BaguaProcessGroup) -> None:
        (of_rank_2 if rank == 2 else of_victim)(whole, 3 - rank, group.get_global_communicator())

    def in_thread(group: BaguaProcessGroup) -> None:
        join_thread(group).submit(lambda: collective("allreduce", group)).result()

    def within(larger: str, part: Callable[[BaguaProcessGroup], None], group: BaguaProcessGroup) -> None:
        with failures_named(group, larger):
            part(group)

    for name, (_, what) in COLLECTIVES.items():
        check_named(partial(collective, name), f"({what})( of .*)?")
    # Messages name their peer. Rank 0 of the group is in no message: it is not missed.
    check_named(partial(message, bagua.recv, bagua.send), f"recv from rank {VICTIM}", [0, *MEMBERS])
    check_named(partial(message, bagua.send, bagua.recv), f"send to rank {VICTIM}", [0, *MEMBERS])
    check_named(in_thread, r"all_reduce of \d+ float32")
    # What a collective is part of is named, once.
    before = current_job_thread().roll_call._joined
    check_named(partial(within, "something larger", partial(collective, "allreduce")), "something larger")
    check_named(partial(within, "something larger", in_thread), "something larger")
    assert current_job_thread().roll_call._joined == before + 2 * (rank == 2)
