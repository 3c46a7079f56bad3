"""A job goes on without ranks that it loses where collectives are only queued, and raise nothing, as NCCL's: with
support.simulated_nccl in place of GPUs. tests/gpu/test_regroup.py has the same with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.regrouped import (
    SMALL_BUCKETS,
    check_ledgers,
    check_stopped_rank,
    die,
    drawn_joins,
    drawn_kills,
    ends_early,
    join_job,
    keep_ledger,
    on_cpus,
    run_job,
)
from support.simulated_nccl import P2P, SIMULATED, SOCKETS
from support.sweeps import rest_is_deep

import bagua.torch_api as bagua
from bagua.regroup import coordinator

STEPS = 8
ENV = {SIMULATED: SOCKETS, **SMALL_BUCKETS}

pytestmark = on_cpus("NCCL is simulated")


@pytest.mark.parametrize("seed", rest_is_deep(range(100), *range(2)))
def test_each_step_of_each_rank_is_trained_once(seed: int) -> None:
    how = ("with_bagua", "wrapper")[seed % 2]
    kills = drawn_kills(seed, 6, 4, STEPS)
    dead = {one.rank for one in kills}
    has_one_pass = seed % 4 == 1
    options = (), True, 1 + has_one_pass, "repeat" if seed % 4 in (1, 2) else "drop", has_one_pass
    results = run_job(6, keep_ledger, kills, STEPS, how, None, 1, *options, env=ENV, expect_death=dead)
    check_ledgers(results, STEPS, dead, has_one_pass)


@pytest.mark.parametrize("seed", rest_is_deep(range(100), 0))
def test_processes_that_join_train_each_step_from_then_on(seed: int) -> None:
    how = ("with_bagua", "wrapper")[seed % 2]
    joins, kills = drawn_joins(seed, 3, 2, STEPS)
    results = run_job(
        *(3, keep_ledger, kills, STEPS, how, None, 1, joins),
        joiners=2,
        env=ENV,
        expect_death={one.rank for one in kills},
    )
    check_ledgers(results, STEPS, {rank for rank, one in enumerate(results) if one is None})


def _own_collectives_and_a_lost_network() -> tuple[int, int, list[float]]:
    rank = join_job(min_ranks=2)
    if rank == 3:
        die()
    values = torch.ones(3)
    with pytest.raises(bagua.Regrouped) as caught:
        dist.all_reduce(values)
    assert caught.value.lost_ranks == (3,)
    work = dist.all_reduce(values.fill_(1), async_op=True)
    work.wait()
    totals = values.tolist()
    current = coordinator.current()
    assert current is not None
    nccl = current._groups.nccl
    assert nccl is not None
    dist.barrier()
    if rank == 1:
        nccl.backend.abort()  # connections of living ranks are lost; nobody was told
        nccl._why = "the network"
    lost: tuple[int, ...] = (-1,)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except bagua.Regrouped as error:
        lost = error.lost_ranks
    assert lost == ()
    dist.all_reduce(values)
    return current.epoch.number, dist.get_world_size(), totals + values.tolist()


def test_collectives_of_the_program_are_waited_for_and_raise() -> None:
    results = run_job(4, _own_collectives_and_a_lost_network, env=ENV, expect_death={3})
    assert results[:3] == [(2, 3, [3.0] * 3 + [9.0] * 3)] * 3


def test_others_go_on_without_a_rank_that_has_ended_which_no_error_tells_them() -> None:
    assert run_job(3, ends_early, env={SIMULATED: P2P}) == [2, 3, 2]


def test_a_rank_that_is_stopped_is_waited_for_up_to_the_timeout(tmp_path: Path) -> None:
    check_stopped_rank(tmp_path / "pid", 3, ENV)
