"""A rank compares its plan with the others, which are late for healthy reasons: they ask and look, and nothing ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from support.logged import Lines
from support.processes import wait_until
from support.rank_tests import on_ranks
from support.training import begin, mlp, momentum

import bagua.torch_api as bagua
from bagua.collectives.communicator import under_way
from bagua.job import computing, job_thread, long_waits
from bagua.job.failure_report import failures_named
from bagua.job.torch_internals import default_store
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def inquiries() -> int:
    return int(default_store().compare_set(long_waits.INQUIRY, "", long_waits.NO_INQUIRY).partition(b":")[0])


def wait_for_inquiries() -> None:
    """Rank 0 has asked often enough to prove a deadlock twice."""
    before = inquiries()
    wait_until(lambda: inquiries() >= before + 4, "inquiries")


@on_ranks(3, timeout=200, joined=False)
def test_a_rank_that_asks_waits_for_those_that_are_late() -> None:
    long_waits.ASK_S, long_waits.REPEAT_S, long_waits.ANSWER_S, long_waits.NAME_S = 0.6, 0.4, 0.3, 0.6
    job_thread.SLOW_TICK_S = job_thread.TICK_S = 0.1
    rank, device = begin()
    net: Any = mlp(rank, device)
    net.with_bagua([momentum(net)], GradientAllReduceAlgorithm())
    group = net.bagua_ddp.process_group
    tensor = torch.zeros(1 << 18, device=device)

    def messages() -> None:
        """Over a slow network: rank 2 takes long to receive what rank 1 sends."""
        if rank == 1:
            bagua.send(tensor, 2)
        if rank == 2:
            with under_way(group.get_global_communicator(), "recv from rank 1", (1, 2)):
                wait_for_inquiries()
                bagua.recv(tensor, 1)

    def no_operation() -> None:
        if rank:
            wait_for_inquiries()

    def the_end_of_a_sum() -> None:
        """Rank 0 has all that it needs."""
        with failures_named(group, "waiting for the gradients of a backward pass", in_order=True):
            if rank:
                wait_for_inquiries()

    ways: list[Callable[[], None]] = [messages, no_operation, the_end_of_a_sum]
    for be_late in ways:
        be_late()
        net.bagua_ddp.replan()
    # Whom the line names it tells to be slower, if it has been for long. Rank 2 compiles.
    told = computing.Computing(*((300, 1.0), (300, 1.8), (60, 90.0))[rank])
    computing.tell(lambda: told)
    lines = Lines().lines
    no_operation()
    net.bagua_ddp.replan()
    if rank == 0:
        wait_until(lambda: any("Not in it" in line for line in lines), "the line")
        line = next(line for line in lines if "Not in it" in line)
        assert line.count("slower") == 1
        assert re.search(r"rank 1 \(.*\): it is in .*, and is 1\.8 times slower at computing: see shares; rank 2", line)
