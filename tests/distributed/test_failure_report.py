"""When a rank dies inside a collective, the others name it."""

from __future__ import annotations

import datetime
import os
import re
import signal
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import PATIENCE_S, wait_until
from support.rank_tests import on_ranks
from support.ranks import run_ranks

from bagua.collectives.initialization import init_process_group
from bagua.collectives.process_group import (
    BaguaProcessGroup,
    duplicate_group,
    from_torch_group,
    to_bagua_process_group,
)
from bagua.job import failure_report, job_thread, lost_ranks, torch_internals
from bagua.job.failure_report import CollectiveError, explain_failure, failures_named, is_communication_error

WHAT = "the all-reduce of bucket 7"


def start(timeout_s: float = 120.0, roll_call_s: float = 3.0) -> tuple[int, BaguaProcessGroup]:
    """A group of all ranks, whose connections exist.

    Both times are real: that a rank does not take part, or does not answer, has no event. They begin when all ranks are
    here; only a machine that leaves a survivor without the CPU for all of `roll_call_s` would have it named as well.
    """
    failure_report.ROLL_CALL_S = roll_call_s
    init_process_group()
    world = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    assert isinstance(world, dist.ProcessGroup)
    group = from_torch_group(world)
    all_reduce(group)
    # By the store: a rank that dies must not take the end of a collective away from the others.
    say(f"started {dist.get_rank()}")
    hear(*(f"started {rank}" for rank in group.ranks))
    return dist.get_rank(), group


def say(key: str) -> None:
    torch_internals.default_store().set(key, "")


def hear(*keys: str) -> None:
    torch_internals.default_store().wait(list(keys), datetime.timedelta(seconds=PATIENCE_S))


def all_reduce(group: BaguaProcessGroup) -> None:
    with failures_named(group, WHAT):
        # Long enough for a ring of pieces, in which only neighbours talk to each other.
        dist.all_reduce(torch.ones(1 << 16), group=group.torch_group)


def report_of(group: BaguaProcessGroup) -> tuple[str, tuple[int, ...], str]:
    """Of an all-reduce that cannot succeed: message, missing ranks, and what the backend had said."""
    try:
        all_reduce(group)
    except CollectiveError as error:
        return str(error), error.missing_ranks, str(error.__cause__)
    raise AssertionError("the all-reduce succeeded")


# --- a rank dies ----------------------------------------------------------------------------------------------------


def lose_a_rank_of_six() -> tuple[str, tuple[int, ...], str]:
    """In the ring, 2 and 4 notice that 3 is dead. The others would wait until these leave, which they do not."""
    rank, group = start(roll_call_s=5.0)
    lost_ranks.END_S = 1.0
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return report_of(group)


def test_survivors_name_the_dead_rank_and_ranks_that_still_wait_end_too() -> None:
    results = run_ranks(6, lose_a_rank_of_six, expect_death={3})
    dead = rf"Rank 3 \(host {re.escape(socket.gethostname())}\) exited\."
    for rank in (0, 1, 2, 4, 5):
        message, missing, cause = results[rank]
        assert missing == (3,)
        assert re.search(rf"{dead}\nOperation on rank {rank}: {WHAT} \(group \d+, ranks 0 to 5\)\.\n", message)
        assert "Check the end of rank 3's log" in message
        assert "restart all ranks from the last checkpoint" in message
        if rank in (2, 4):
            # Rank 4 receives from rank 3. Rank 2 sends to it, which gloo has once not found out in ten seconds: then
            # the job's thread closed its connections (bagua.job.lost_ranks).
            ended = "|Application timeout" if rank == 2 else ""
            assert re.search(f"(Read error|Connection closed).* 127{ended}", message.replace("[", " ")), message
            assert "gloo" in cause


def lose_the_store() -> tuple[str, tuple[int, ...], str]:
    """Nobody can tell those that are not neighbors of rank 0 in the ring, and the neighbors do not leave."""
    rank, group = start()
    roll = job_thread.current_job_thread()
    wait_until(lambda: roll._store._client is not None, "a connection of the roll call's own")
    say(f"connected {rank}")
    if rank == 0:
        hear(*(f"connected {other}" for other in group.ranks))
        os.kill(os.getpid(), signal.SIGKILL)
    return report_of(group)


def test_the_store_dies_with_its_rank() -> None:
    for message, missing, cause in run_ranks(6, lose_the_store, expect_death={0})[1:]:
        assert missing == ()
        assert re.search(r"store is unreachable .*Check the end of the log of rank 0, which", message, re.DOTALL)
        assert "gloo" in cause


# --- nobody dies ----------------------------------------------------------------------------------------------------


def make_a_group_alone() -> str | None:
    """Rank 0 is in something else, as one whose gradients are exchanged while rank 1 saves its first checkpoint."""
    rank, group = start()
    # Real time, of this wait alone: that nobody comes has no event. A slow machine tells it later.
    group.timeout = datetime.timedelta(seconds=4)
    if rank == 0:
        with failures_named(group, "waiting for the gradients of a backward pass"):
            hear("reported")
        return None
    with pytest.raises(CollectiveError) as raised:
        duplicate_group(group)
    say("reported")
    return str(raised.value)


def test_a_group_that_others_do_not_make() -> None:
    _, told = run_ranks(2, make_a_group_alone)
    lines = told.splitlines()
    assert lines[0] == "A collective failed although all ranks responded."
    assert lines[1].startswith("Operation on rank 1: making a group of ranks 0 and 1 (")
    assert lines[2] == "Operation on rank 0: waiting for the gradients of a backward pass."


# --- what is translated, and what is not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error: remote process exited"),
        dist.DistNetworkError("Connection reset by peer"),
        RuntimeError(
            "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:7: Connection reset by peer"
        ),
        RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:7"),
        RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:79] Timed out waiting 100ms for recv operation"),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:314] Write timeout [::1]:7"),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:339] writev [::1]:7: Broken pipe"),
        RuntimeError("[/x/gloo/transport/tcp/pair.cc:812] Socket closed [::1]:7"),
        RuntimeError("Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.h:311] Connect timeout [::1]:7"),
    ],
)
def test_errors_of_communication(error: Exception) -> None:
    assert is_communication_error(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("gloo connection closed"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Connection closed by the data loader"),
        RuntimeError("[enforce fail at /x/third_party/gloo/gloo/allreduce.cc:31] connection count. 1 vs 2"),
        dist.DistStoreError("wait timeout after 100ms"),
        NotImplementedError("gloo: timeout"),
        KeyError("gloo timeout"),
    ],
)
def test_other_errors(error: Exception) -> None:
    assert not is_communication_error(error)


@on_ranks(2, joined=False)
def test_only_errors_of_communication_are_translated() -> None:
    _, group = start()
    mine = ValueError("wrong argument")
    with pytest.raises(ValueError, match="wrong argument") as raised, failures_named(group, WHAT):
        raise mine
    assert raised.value is mine
    with pytest.raises(KeyboardInterrupt), failures_named(group, WHAT):
        raise KeyboardInterrupt

    inner = CollectiveError("gloo: connection closed, told by an inner one", (7,))
    with pytest.raises(CollectiveError) as told, failures_named(group, WHAT):
        raise inner
    assert told.value is inner

    lost = dist.DistNetworkError("connection closed")
    with pytest.raises(CollectiveError, match=WHAT) as named, failures_named(group, WHAT):
        raise lost
    assert named.value.__cause__ is lost
    assert named.value.missing_ranks == ()
    assert "all ranks responded" in str(named.value)

    # Again, within the same minute: a roll of its own.
    with pytest.raises(CollectiveError, match="all ranks responded"), failures_named(group, WHAT):
        raise lost
    assert not job_thread.current_job_thread().waits


def explain_after_shutdown() -> str:
    _, group = start()
    dist.destroy_process_group()
    with failures_named(group, WHAT):
        pass
    error = dist.DistBackendError("lost")
    report = explain_failure(error, group, WHAT)
    assert report.__cause__ is error
    return str(report)


def test_an_explanation_that_fails_is_still_a_report() -> None:
    assert re.search(
        f"store is unreachable.*{WHAT}.*DistBackendError: lost", run_ranks(1, explain_after_shutdown)[0], re.DOTALL
    )


def start_again(folder: str) -> bool:
    rank, group = start()
    first = job_thread.current_job_thread()
    dist.destroy_process_group()
    init_process_group(dist.FileStore(f"{folder}/store", 2), rank, 2, 2)
    group = to_bagua_process_group()
    all_reduce(group)
    second = job_thread.current_job_thread()
    first._thread.join(PATIENCE_S)
    with pytest.raises(CollectiveError, match="all ranks responded"), failures_named(group, WHAT):
        raise dist.DistNetworkError("connection closed")
    return first is not second and not first._thread.is_alive() and second._thread.is_alive()


def test_a_new_default_group_has_its_own_thread(tmp_path: Path) -> None:
    assert run_ranks(2, start_again, str(tmp_path)) == [True, True]
