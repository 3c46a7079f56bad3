"""A rank dies while the others train with NCCL: they name it before torch's watchdog ends them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading

import pytest
import torch
from support.dying_rank import VICTIM, begin_to_lose_one, die
from support.ranks import DEVICE_VARIABLE, SHARING_VARIABLE, run_ranks
from support.training import batches, mlp, momentum, train

from bagua.job import failure_report
from bagua.job.failure_report import CollectiveError
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

PATIENCE_S = 40.0


def _loses_a_rank(victim: int) -> str:
    rank, device = begin_to_lose_one()
    printed: queue.Queue[str] = queue.Queue()
    failure_report._print = lambda report: printed.put(str(report))
    net = mlp(rank, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    data = batches(rank, 4, device)

    def train_on() -> None:
        torch.cuda.set_device(device)
        for step in itertools.count():
            if step == 1 and rank == victim:
                die()
            # A rank that is about to launch when NCCL fails raises, and prints the same.
            with contextlib.suppress(CollectiveError):
                train(net, optimizer, data)

    threading.Thread(target=train_on, daemon=True).start()
    return printed.get(timeout=PATIENCE_S)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3])
def test_survivors_name_the_rank_that_died(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """All but the dead one answer, though they wait for their GPUs."""
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setenv(SHARING_VARIABLE, "1")
    told = run_ranks(ranks, _loses_a_rank, VICTIM, expect_death={VICTIM}, timeout=100)
    for rank in set(range(ranks)) - {VICTIM}:
        assert f"Rank {VICTIM} " in told[rank]
        assert "exited" in told[rank] or "did not respond" in told[rank]
        assert f"Operation on rank {rank}: " in told[rank]


@pytest.mark.gpu
def test_survivors_end_when_the_store_dies_with_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say who is there. Those that are not neighbors of rank 0 in the ring end, too."""
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setenv(SHARING_VARIABLE, "1")
    told = run_ranks(4, _loses_a_rank, 0, expect_death={0}, timeout=100)
    for rank in range(1, 4):
        assert "store is unreachable" in told[rank]
        assert "rank 0" in told[rank]
