"""Buckets that are tuned while training goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from support.training import batches, begin, check_equal, check_ranks_equal, message_of, mlp, momentum, train

from bagua.engine import bucket_search, bucket_tuner
from bagua.torch_api.algorithms import Algorithm

STEPS = 300


def _tuned(name: str, is_default_best: bool) -> tuple[int | None, int]:
    """The chosen size, and how many steps were made until it was. Time is played: one size makes faster steps."""
    rank, device = begin()
    bucket_search._MIB, bucket_search._SIZES = 256, (1, 2, 4)  # the module has 3 KiB
    net: Any = mlp(rank, device)
    twin = copy.deepcopy(net)
    optimizers = [momentum(one) for one in (net, twin)]
    net.with_bagua([optimizers[0]], Algorithm.init(name), autotune=True)
    twin.with_bagua([optimizers[1]], Algorithm.init(name))
    engine = net.bagua_ddp

    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            is_fast = engine.bucket_bytes == 512 and not is_default_best
            # On another rank everything is slower, as if it had to do something else: rank 0 decides.
            self.now += (0.5 if is_fast else 1.0) * (1 + 100 * rank)
            return self.now

    bucket_tuner.time = Clock()  # type: ignore[assignment]
    try:
        data = batches(rank, STEPS, device)
        done = STEPS
        for step, batch in enumerate(data):
            for model, optimizer in zip((net, twin), optimizers, strict=True):
                with model.bagua_ddp.no_sync():
                    model(batch[0]).sum().backward()  # one that accumulates is no step
                train(model, optimizer, [batch])
            assert engine._tuner is None or engine._tuner._steps == step + 1
            if step == 20:
                net.eval()
                net(batch[0])  # on this rank alone, if it likes: does not count
                net.train()
            if engine._tuner is None:
                done = min(done, step)
            if step >= done + 20:  # some with what was chosen
                break
    finally:
        bucket_tuner.time = __import__("time")
        bucket_search._MIB, bucket_search._SIZES = 1 << 20, (1, 2, 5, 10, 25, 50, 100, 200)
    if name == "gradient_allreduce":
        check_equal(net, twin, "two ranks: sums have the same bits in whatever buckets")
        check_ranks_equal(net)
    assert all(one.isfinite().all() for one in net.parameters())
    return engine.bucket_bytes, done


# How a search ends depends on the clock, not on the algorithm.
@pytest.mark.parametrize(
    ("name", "is_default_best"),
    [("gradient_allreduce", False), ("bytegrad", False), ("decentralized", False), ("bytegrad", True)],
)
def test_the_fastest_is_found_and_results_stay(name: str, is_default_best: bool) -> None:
    (size, steps), other = run_ranks(2, _tuned, name, is_default_best, reuse=True)
    assert (size, steps) == other
    assert size == (None if is_default_best else 512)
    assert steps < STEPS


def test_the_variable_switches_it_on() -> None:
    assert run_ranks(1, _is_tuning, env={"BAGUA_AUTOTUNE": "1"}) == [True]
    assert run_ranks(1, _is_tuning) == [False]


def _is_tuning() -> bool:
    rank, device = begin()
    net: Any = mlp(rank, device)
    net.with_bagua([torch.optim.SGD(net.parameters(), lr=0.1)], Algorithm.init("gradient_allreduce"))
    return net.bagua_ddp._tuner is not None


def _tuned_by_one() -> str:
    rank, device = begin()
    net: Any = mlp(rank, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return message_of(RuntimeError, lambda: net.with_bagua([optimizer], Algorithm.init("bytegrad"), autotune=rank == 1))


def test_one_rank_alone_may_not_tune() -> None:
    for message in run_ranks(2, _tuned_by_one, reuse=True):
        assert "rank 0 has autotune=False; rank 1 has autotune=True" in message
