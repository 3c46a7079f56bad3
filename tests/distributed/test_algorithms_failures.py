"""A rank dies in the middle of training, whatever the algorithm: the others raise and say which, and nobody hangs."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from support.algorithm_cases import CASES, WARMUP_STEPS, Case, pulling, step
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.ports import free_port
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import TWO_NODES_OF_TWO, loss_of, mlp

from bagua.comm_ops import all_reduce, chunk_exchange
from bagua.job.failure_report import CollectiveError

DEATH = WARMUP_STEPS + 3  # QAdam's warm-up is over
# Training goes on for so long if nobody notices anything: longer than it may take to notice.
PATIENCE_S = 30.0


def _train_until_error(cases: Sequence[Case], how: str) -> tuple[str, tuple[int, ...]]:
    rank, device = begin_to_lose_one()
    case = next(one for one in cases if str(one) == os.environ["CASE"])
    if how == "in backward, by messages":
        all_reduce.DIRECT_BYTES = chunk_exchange.DIRECT_BYTES = 0
    net = mlp(rank, device)
    optimizer = case.optimizer(net)
    model = case.wrap(net, optimizer)
    data = pulling(rank, 8, device)
    number, deadline = 0, time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < deadline:
            number += 1
            batch = data[number % len(data)]
            if rank == VICTIM and number == DEATH:
                _end_this_rank(how, model, optimizer, batch)
            step(model, optimizer, batch)
    except CollectiveError as error:
        return str(error), error.missing_ranks
    raise AssertionError(f"{case}: {number} steps were made, most of them without the rank that died")


def _end_this_rank(how: str, model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    if how == "before forward":
        die()
    if how.startswith("in backward"):
        next(model.parameters()).register_hook(die)
        step(model, optimizer, batch)
    if how == "before step":
        loss_of(model, batch).backward()
        die()
    try:
        optimizer.zero_grad()
        model(batch[0])
        raise KeyError("of the loss")
    except KeyError:
        # As the interpreter ends after an exception that nobody has caught, but for waiting for threads.
        traceback.print_exc()
        os._exit(1)


def _one_job_each(cases: Sequence[Case], job: Sequence[Mapping[str, str]], how: str) -> None:
    """All algorithms at once, each a job of its own: they spend their time waiting."""
    ranks, environments, where = len(job), [], []
    ports: set[str] = set()
    while len(ports) < len(cases):
        ports.add(str(free_port()))
    for case, port in zip(cases, ports, strict=True):
        for rank, place in enumerate(job):
            environments.append(
                {**place, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port, "CASE": str(case)}
            )
            where.append((case, rank))
    victims = {index for index, (_, rank) in enumerate(where) if rank == VICTIM}
    told = run_ranks(len(where), _train_until_error, list(cases), how, env=environments, expect_death=victims)
    for (case, rank), one in zip(where, told, strict=True):
        if rank == VICTIM:
            assert one is None, case
            continue
        message, missing = one
        assert missing == (VICTIM,), f"{case}: {message}"
        assert message.startswith(f"Rank {VICTIM} (host ")


TWO_RANKS = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)]


HOWS = ["in backward", "in backward, by messages", "before step", "an exception in the loss"]


@pytest.mark.parametrize("how", rest_is_deep(HOWS, 1, 2))
def test_one_of_two_ranks_dies(how: str) -> None:
    _one_job_each(CASES, TWO_RANKS, how)


def test_one_rank_of_a_node_dies() -> None:
    hierarchical = [case.on_nodes() for case in CASES if case.on_nodes() != case]
    _one_job_each(hierarchical, TWO_NODES_OF_TWO, "before forward")
