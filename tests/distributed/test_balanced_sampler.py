"""Ranks get parts of a global batch by their speed, and each sample of an epoch once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua.torch_api as bagua
from bagua.torch_api.contrib import BalancedSampler, balanced_sampler

SPEEDS = (2.0, 1.0, 1.0)


def _everybody(values: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, values)
    return told


def _compute_at(speeds: tuple[float, ...], sampler: BalancedSampler, rank: int) -> None:
    """In place of the clock: what this rank needs for its part."""
    balanced_sampler._computing_s = lambda _: sampler.parts[rank] / speeds[rank]


@on_ranks(3, fresh=True)
def test_parts_follow_the_speeds_and_every_sample_comes_once(rank: int) -> None:
    data = TensorDataset(torch.arange(1030))
    sampler = BalancedSampler(data, batch_size=40, every=8, seed=1)
    _compute_at(SPEEDS, sampler, rank)
    seen, sizes, states = [], [], []
    # With workers, batches are fetched ahead.
    for (batch,) in DataLoader(data, batch_sampler=sampler, num_workers=2):
        seen += batch.tolist()
        sizes.append(len(batch))
        states.append(sampler.state_dict())
    assert sorted(index for one in _everybody(seen) for index in one) == list(range(1030))
    by_batch = list(zip(*_everybody(sizes), strict=True))
    assert by_batch[:8] == [(14, 13, 13)] * 8
    assert by_batch[8:25] == [(20, 10, 10)] * 17
    assert by_batch[25] == (15, 8, 7)  # what is left
    assert len(sampler) == len(by_batch)
    # Resumed, ranks have the parts that they would have had, whatever they would measure now.
    resumed = BalancedSampler(data, batch_size=40, every=8, seed=1)
    _compute_at((1.0, 1.0, 5.0), resumed, rank)
    resumed.load_state_dict({**states[0], "position": 20, "shares": states[-1]["shares"], "since_change": 0})
    loader = DataLoader(data, batch_sampler=resumed, num_workers=1)
    assert [len(batch) for (batch,) in loader] == sizes[20:]
    with pytest.raises(ValueError, match="batch_size is 41, was 40"):
        BalancedSampler(data, batch_size=41, every=8, seed=1).load_state_dict(states[0])
    # Another epoch has another order; equal ranks stay equal.
    sampler.set_epoch(1)
    alike = BalancedSampler(data, batch_size=41, every=8, drop_last=True)
    _compute_at((1.0, 1.02, 0.99), alike, rank)
    assert {len(batch) for batch in alike} == {len(next(iter(alike)))}
    assert next(iter(sampler)) != next(iter(resumed))
    # With costs, all ranks have samples of similar cost; what is left at the end is not always the most expensive.
    costs = [float(index * 7 % 1030) for index in range(1030)]
    dear = BalancedSampler(costs, 40, every=8, shares=[2, 1, 1], complexity_fn=float)
    lasts = set()
    for epoch in range(3):
        dear.set_epoch(epoch)
        batches = _everybody(list(dear))
        assert sorted(index for one in batches for batch in one for index in batch) == list(range(1030))
        for parts in zip(*batches, strict=True):
            of_batch = [costs[index] for part in parts for index in part]
            assert len(parts[0]) == len(of_batch) // 2
            assert max(of_batch) - min(of_batch) < 40 + 30  # the samples of the last batch may lie between them
        lasts.add(min(of_batch))
    assert len(lasts) == 3
    in_order = BalancedSampler(costs, 40, every=8, complexity_fn=float, shuffle=False)
    assert [costs[index] for index in next(iter(in_order))] == [[*range(14)], [*range(14, 27)], [*range(27, 40)]][rank]
    # Ranks that divide different batches are told when they agree for the first time.
    for different, text in (
        ({"complexity_fn": lambda _: rank}, "costs is"),
        ({"seed": rank % 2}, "seed is 0 on rank 0, and 1 on rank 1"),
        ({"shares": [1, 1, 1 + rank]}, "shares is"),
    ):
        with pytest.raises(ValueError, match=f"ranks divide different batches.*{text}"):
            list(BalancedSampler(data, 40, every=8, **different))  # type: ignore[arg-type]
    # By hand.
    assert BalancedSampler(data, 40, shares=[2, 1, 1]).parts == [20, 10, 10]
    for wrong, text in (
        ({"batch_size": 2}, "batch_size=2 must be at least 3"),
        ({"batch_size": 9, "every": 7}, "every=7 must be at least 8"),
        ({"batch_size": 9, "shares": "speed"}, "shares='speed' is unknown"),
        ({"batch_size": 9, "shares": [1, 2]}, "must be 3 positive numbers"),
        ({"batch_size": 9, "shares": [1, 2, 0]}, "must be 3 positive numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            BalancedSampler(data, **wrong)  # type: ignore[arg-type]
    for wrong in (
        {"batch_size": 8.5},
        {"batch_size": 9, "shares": None},
        {"batch_size": 9, "shares": ["2", "1", "1"]},
        {"batch_size": 9, "shares": [2, None, 1]},
        {"batch_size": 9, "complexity_fn": 1},
        {"batch_size": 9, "drop_last": "no"},
    ):
        with pytest.raises(TypeError, match="Pass "):
            BalancedSampler(data, **wrong)  # type: ignore[arg-type]


@on_ranks(2, fresh=True)
def test_training_with_parts_is_that_of_the_whole_batch_and_without_weights_a_warning_says_so(rank: int) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(320, 4, dtype=torch.float64))
    for weighted in (True, False):
        sampler = BalancedSampler(data, batch_size=16, every=8)
        _compute_at((3.0, 1.0), sampler, rank)
        torch.manual_seed(1)
        net, alone = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        model = bagua.with_bagua(net, [optimizer], count_batch=weighted)
        alone.load_state_dict(net.state_dict())
        order = torch.randperm(320, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number, (batch,) in enumerate(DataLoader(data, batch_sampler=sampler)):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                alone.zero_grad()
                alone(data.tensors[0][order[16 * number : 16 * number + 16]]).square().mean().backward()
                if weighted:
                    torch.testing.assert_close(net.weight.grad, alone.weight.grad, rtol=1e-12, atol=0)
        assert sampler.parts == [12, 4]
        assert [("Wrap it with count_batch=True" in str(one.message)) for one in told] == ([] if weighted else [True])
        if not weighted:  # parts by hand are known from the start
            with pytest.warns(UserWarning, match="Wrap it with count_batch=True"):
                next(iter(BalancedSampler(data, batch_size=16, shares=[3, 1])))
        model.bagua_ddp.detach()
