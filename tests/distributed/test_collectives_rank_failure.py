"""A rank dies in the middle of plain collectives: the others say which."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.processes import PATIENCE_S, wait_until
from support.ranks import run_ranks

import bagua.torch_api as bagua
from bagua.collectives.communicator import BaguaCommunicator, CommMember
from bagua.collectives.process_group import to_bagua_process_group
from bagua.engine.comm_thread import join_thread
from bagua.job.failure_report import CollectiveError, failures_named
from bagua.job.job_thread import current_job_thread
from bagua.job.torch_internals import default_store
from bagua.torch_api import communication

RANKS = 3
PART = 1 << 12  # elements
PARTS = [PART] * RANKS, range(0, RANKS * PART, PART)
CALLS_BEFORE_DEATH = 2
CALLS = 10_000  # whoever only sends may succeed for as long as the network takes what it sends
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
    "scatter": (lambda comm, whole: bagua.scatter(whole, whole[:PART].clone(), VICTIM, comm), "scatter"),
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

Told = tuple[str, tuple[int, ...], str]  # message, missing ranks, and what the backend has said


def call_until_it_fails(call: Callable[[], Any], is_victim: bool) -> Told:
    try:
        for number in range(CALLS):
            if is_victim and number == CALLS_BEFORE_DEATH:
                die()
            call()
    except CollectiveError as error:
        return str(error), error.missing_ranks, str(error.__cause__)
    raise AssertionError("all calls succeeded without the rank that died")


def lose_one_in(name: str) -> Told:
    rank, device = begin_to_lose_one()
    whole = torch.ones(RANKS * PART, device=device)
    comm = to_bagua_process_group().get_global_communicator()
    return call_until_it_fails(lambda: COLLECTIVES[name][0](comm, whole), rank == VICTIM)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_survivors_name_the_rank_that_died(name: str) -> None:
    told = run_ranks(RANKS, lose_one_in, name, expect_death={VICTIM})
    for rank in (0, 2):
        message, missing, cause = told[rank]
        assert missing == (VICTIM,), message
        assert re.search(rf"\nOperation on rank {rank}: ({COLLECTIVES[name][1]})( of .*)? \(group ", message), message
        assert "gloo" in cause


def lose_one_of_a_group() -> Told | None:
    """The victim is rank 0 of the group."""
    rank, device = begin_to_lose_one()
    comm = communication.new_group([VICTIM, 2]).get_global_communicator()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    return call_until_it_fails(lambda: bagua.allreduce_inplace(torch.ones(9, device=device), comm=comm), rank == VICTIM)


def test_ranks_are_named_as_in_the_world_by_groups_of_some() -> None:
    outside, _, told = run_ranks(RANKS, lose_one_of_a_group, expect_death={VICTIM})
    assert outside is None
    assert told[1] == (VICTIM,)
    assert f"ranks {VICTIM} and 2)" in told[0]


def lose_the_peer(survivor: int) -> Told | None:
    """The third rank is in no collective: it is not missed."""
    rank, device = begin_to_lose_one()
    tensor = torch.ones(9, device=device)
    message = bagua.send if (rank == VICTIM) != (survivor == 2) else bagua.recv
    if rank in (VICTIM, survivor):
        peer = VICTIM if rank == survivor else survivor
        return call_until_it_fails(lambda: message(tensor, peer), rank == VICTIM)
    return None


@pytest.mark.parametrize(("survivor", "what"), [(0, "recv from"), (2, "send to")])
def test_messages_name_their_peer(survivor: int, what: str) -> None:
    told = run_ranks(RANKS, lose_the_peer, survivor, expect_death={VICTIM})
    message, missing, _ = told[survivor]
    assert missing == (VICTIM,)
    assert f"\nOperation on rank {survivor}: {what} rank {VICTIM} (group " in message
    assert told[2 - survivor] is None


def lose_one_within(where: str) -> tuple[Told, int]:
    """A collective as a part of something larger, on the same thread or on that of the group's buckets. Also how often
    the roll was called."""
    rank, device = begin_to_lose_one()
    group = to_bagua_process_group()
    tensor = torch.ones(9, device=device)
    thread = join_thread(group)

    def call() -> None:
        with failures_named(group, "something larger"):
            if where == "here":
                bagua.allreduce_inplace(tensor)
            else:
                thread.submit(lambda: bagua.allreduce_inplace(tensor)).result()

    told = call_until_it_fails(call, rank == VICTIM)
    return told, current_job_thread().roll_call._joined


@pytest.mark.parametrize("where", ["here", "thread"])
def test_what_a_collective_is_part_of_is_named_once(where: str) -> None:
    results = run_ranks(RANKS, lose_one_within, where, expect_death={VICTIM})
    for (message, missing, cause), calls in (results[0], results[2]):
        assert ": something larger (group " in message
        assert missing == (VICTIM,)
        assert "gloo" in cause
        assert calls == 1


def lose_one_in_the_thread() -> Told:
    rank, device = begin_to_lose_one()
    thread = join_thread(to_bagua_process_group())
    tensor = torch.ones(9, device=device)
    return call_until_it_fails(lambda: thread.submit(lambda: bagua.allreduce_inplace(tensor)).result(), rank == VICTIM)


def test_a_collective_in_the_thread_is_named_where_its_submitter_names_nothing() -> None:
    told = run_ranks(RANKS, lose_one_in_the_thread, expect_death={VICTIM})
    for message, missing, _ in (told[0], told[2]):
        assert ": all_reduce of 9 float32 (" in message
        assert missing == (VICTIM,)


def abort_and_lose_the_peer() -> tuple[str, str] | None:
    """An abort ends a message, and explains by itself why nothing works: nobody is asked. The peer lives until then."""
    rank, device = begin_to_lose_one()
    comm = to_bagua_process_group().get_global_communicator()
    if rank == VICTIM:
        default_store().wait(["aborted"])
        die()
    if rank != 0:
        return None

    def abort() -> None:
        wait_until(lambda: bool(current_job_thread().waits), "the reception")
        comm.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(RuntimeError) as raised:
        bagua.recv(torch.ones(9, device=device), VICTIM, comm)
    thread.join(PATIENCE_S)
    default_store().set("aborted", "")
    return str(raised.value), str(raised.value.__context__)


def test_an_aborted_communicator_says_so() -> None:
    told = run_ranks(RANKS, abort_and_lose_the_peer, expect_death={VICTIM})[0]
    assert told[0].startswith(f"recv from rank {VICTIM} on the global communicator")
    assert "was aborted" in told[0]
    assert "pair closure" in told[1]
