"""How asynchronous model averaging ends: models that are dropped, ranks that die, programs that end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from support.async_runs import Run, threads, until
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.forked_program import run_programs
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import (
    batches,
    message_of,
)

from bagua.job.failure_report import CollectiveError


@pytest.mark.parametrize("trains", [(0, 1), (0,)])
@on_ranks(2, fresh=True)
def test_a_module_that_is_dropped_ends_its_loop(rank: int, device: torch.device, trains: Sequence[int]) -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    run = Run(rank, device, interval_ms=10)
    if rank in trains:
        run.train(batches(rank, 5, device))
    assert threads() == 1
    engine = weakref.ref(run.net.bagua_ddp)
    del run
    gc.collect()
    assert engine() is None
    until(lambda: threads() == 0)
    until(lambda: len(dist.distributed_c10d._world.pg_map) <= groups)  # an earlier one may end, too


def _killed() -> tuple[str, tuple[int, ...]]:
    rank, device = begin_to_lose_one()
    run = Run(rank, device)
    data = batches(rank, 5, device)
    if rank == VICTIM:
        run.train_until_averaged(data, times=2)
        die()
    with pytest.raises(CollectiveError) as raised:
        run.train_until(lambda: False, data)
    assert run.algorithm.status == "failed"
    assert message_of(CollectiveError, run.abort) == str(raised.value)
    run.net.bagua_ddp.detach()  # does not wait for anybody
    return str(raised.value), raised.value.missing_ranks


def test_survivors_name_the_rank_that_died() -> None:
    told = run_ranks(3, _killed, expect_death={VICTIM})
    for message, missing in (told[0], told[2]):
        assert missing == (VICTIM,), message
        assert f"rank {VICTIM}" in message
        assert "averag" in message


@on_ranks(2, fresh=True)
def test_shutting_torch_down_while_the_loop_runs_is_an_error_of_the_next_step(rank: int, device: torch.device) -> None:
    run = Run(rank, device, interval_ms=1)
    data = batches(rank, 5, device)
    run.train(data)
    dist.destroy_process_group()
    told = "abort(model) on every rank before destroy_process_group()"
    message_of(RuntimeError, lambda: run.train_until(lambda: False, data), told)


FORGETFUL = """
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

bagua.init_process_group()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.with_bagua([optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=20))
for _ in range(20 + 20 * bagua.get_rank()):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_program_that_forgets_abort_ends() -> None:
    for done in run_programs(2, FORGETFUL):
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert "Traceback" not in output, output
        assert "abort(model)" not in output, "the ranks found each other ending"
