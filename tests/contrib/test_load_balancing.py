"""Load-balancing samplers: the specified order, balance, coverage and padding for any sizes, resumption, and a job."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import types
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.tool_module import load_script
from torch.utils.data import DataLoader

from bagua.contrib.load_balancing_data_loader import LoadBalancingDistributedBatchSampler as BatchSampler
from bagua.contrib.load_balancing_data_loader import LoadBalancingDistributedSampler
from bagua.contrib.load_balancing_data_loader import LoadBalancingDistributedSampler as IndexSampler

COSTS = st.lists(st.integers(0, 20) | st.floats(0, 20), max_size=25)
RANKS = st.integers(1, 7)


def _samplers(costs: Any, ranks: int, **options: Any) -> list[IndexSampler]:
    return [IndexSampler(costs, lambda cost: cost, ranks, rank, **options) for rank in range(ranks)]


# --- order -----------------------------------------------------------------------------------------------------------


def test_without_shuffling_samples_come_from_cheap_to_expensive() -> None:
    costs = [5, 1, 4, 1, 3, 9, 2]
    assert [list(one) for one in _samplers(costs, 2, shuffle=False)] == [[1, 6, 2, 5], [3, 4, 0, 1]]
    assert [list(one) for one in _samplers(costs, 2, shuffle=False, drop_last=True)] == [[1, 6, 2], [3, 4, 0]]
    assert [list(one) for one in _samplers([7, 3], 5, shuffle=False)] == [[1], [0], [1], [0], [1]]


@pytest.mark.parametrize(("epoch", "level"), [(0, 0), (3, 0), (2, 0.5)])
def test_the_order_is_that_of_one_generator(epoch: int, level: float) -> None:
    costs = [(7 * index) % 23 for index in range(23)]
    generator = torch.Generator().manual_seed(40 + epoch)
    noise = torch.randint(int(22 * level + 1), (23,), generator=generator)
    order = sorted(range(23), key=lambda index: costs[index] + int(noise[index]))
    order += order[:1]
    chunks = [order[start : start + 4] for start in range(0, 24, 4)]
    expected = [chunks[number] for number in torch.randperm(6, generator=generator)]
    for rank, sampler in enumerate(_samplers(costs, 4, seed=40, random_level=level)):
        sampler.set_epoch(epoch)
        assert list(sampler) == [chunk[rank] for chunk in expected]


@given(COSTS, RANKS, st.booleans(), st.booleans(), st.sampled_from([0, 0.3, 1]), st.integers(0, 3))
def test_every_sample_comes_once_but_for_the_documented_padding(
    costs: list[float], ranks: int, shuffle: bool, drop_last: bool, level: float, epoch: int
) -> None:
    samplers = _samplers(costs, ranks, shuffle=shuffle, drop_last=drop_last, random_level=level)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    by_rank = [list(sampler) for sampler in samplers]
    number = len(costs) // ranks if drop_last else -(-len(costs) // ranks)
    assert [len(sampler) for sampler in samplers] == [len(one) for one in by_rank] == [number] * ranks
    times = Counter(index for one in by_rank for index in one)
    repeated = number * ranks - len(costs)
    if drop_last:
        assert set(times.values()) <= {1}
        assert 0 <= -repeated < ranks
    else:
        assert set(times) == set(range(len(costs)))
        assert max(times.values(), default=1) - min(times.values(), default=1) <= 1
        assert 0 <= repeated < ranks
    if level == 0:
        # No sample's cost lies strictly between two of a step, unless that step wraps around.
        steps = [sorted(costs[index] for index in step) for step in zip(*by_rank, strict=True)]
        full = [step for step in steps if not repeated or step[-1] < max(costs)]
        assert all(not step[0] < cost < step[-1] or cost in step for step in full for cost in costs)


def test_epochs_have_other_orders_and_ranks_and_runs_the_same() -> None:
    """Costs are evaluated once."""
    calls: list[int] = []
    sampler = IndexSampler(range(64), lambda item: calls.append(item) or item, 4, 1)
    first = list(sampler)
    assert list(sampler) == first == list(IndexSampler(range(64), float, 4, 1))
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert sorted(sampler) == sorted(first), "random_level is 0: chunks stay"
    assert calls == list(range(64))
    with torch.device("meta"):
        assert list(sampler) == list(sampler), "a default device does not move the order"


@pytest.mark.parametrize(
    "kind",
    [torch.uint8, torch.int16, torch.int64, torch.float32, np.uint8, np.int16, np.uint64, np.float32, np.longdouble],
    ids=str,
)
def test_costs_of_every_type_give_the_same_order(kind: Any) -> None:
    """Also those in whose type a sum would overflow, and as tensors and arrays without dimensions or of one element."""
    values = [7, 3, 250, 9, 100, 1, 30, 20]
    expected = _samplers(values, 2, random_level=1, seed=3)[0].chunks()
    costs: Any = torch.tensor(values).to(kind) if isinstance(kind, torch.dtype) else np.array(values).astype(kind)
    for given_costs in (costs, costs.reshape(-1, 1), [costs[index : index + 1].reshape(()) for index in range(8)]):
        sampler = _samplers(given_costs, 2, random_level=1, seed=3)[0]
        assert sampler.chunks() == expected
        assert sampler.dataset is given_costs


@pytest.mark.parametrize("level", [0, 0.5, 1])
@pytest.mark.parametrize(
    "costs",
    [
        [2**70, 1, 2**69, 5],
        [10**400, 1.5, -(10**400), Fraction(1, 3)],
        [1e308, -1e308, 0, 1],
        [-100, 120, 5, 5],
        [True, False, True, False],
        [0, 0, 0, 0],
    ],
)
def test_costs_of_any_size(costs: list[Any], level: float) -> None:
    chunks = _samplers(costs, 2, random_level=level)[0].chunks()
    assert sorted(index for chunk in chunks for index in chunk) == [0, 1, 2, 3]
    if level == 0:
        order = sorted(range(4), key=costs.__getitem__)
        assert sorted(chunks) == sorted([order[:2], order[2:]])


# --- batches ---------------------------------------------------------------------------------------------------------


def _by_budget(costs: list[float], budget: float) -> Any:
    """Batches whose costs add up to at most `budget`, or that have one sample."""

    def cut(indices: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        room = 0.0
        for index in indices:
            if not batches or costs[index] > room:
                batches.append([])
                room = budget
            batches[-1].append(index)
            room -= costs[index]
        return batches

    return cut


@given(COSTS, RANKS, st.booleans(), st.integers(0, 2))
def test_all_ranks_have_equally_many_batches(costs: list[float], ranks: int, drop_last: bool, epoch: int) -> None:
    cut = _by_budget(costs, 20)
    indices, batches = [], []
    for sampler in _samplers(costs, ranks):
        one = BatchSampler(sampler, cut, drop_last)
        one.set_epoch(epoch)
        indices.append(list(sampler))
        batches.append(list(one))
        assert len(one) == len(batches[-1])
    whole = [cut(one) for one in indices]
    number = (min if drop_last else max)(len(one) for one in whole)
    for ours, expected in zip(batches, whole, strict=True):
        assert len(ours) == number
        assert ours == (expected * number)[:number]


def test_the_epoch_of_the_sampler_is_that_of_the_batches() -> None:
    sampler = IndexSampler(range(40), float, 2, 0)
    batches = BatchSampler(sampler, lambda indices: [indices[:9], indices[9:]])
    first = list(batches)
    sampler.set_epoch(5)
    assert batches.epoch == 5
    assert list(batches) == [list(sampler)[:9], list(sampler)[9:]] != first


# --- resumption ------------------------------------------------------------------------------------------------------


@given(COSTS, RANKS, st.data())
def test_a_state_continues_the_epoch_and_then_goes_on(costs: list[float], ranks: int, data: st.DataObject) -> None:
    for make in (lambda one: one, lambda one: BatchSampler(one, lambda indices: [[index] for index in indices])):
        whole = make(IndexSampler(costs, float, ranks, 0))
        whole.set_epoch(4)
        expected = list(whole)
        assert whole.state_dict()["position"] == len(expected)
        iterator = iter(whole)
        position = data.draw(st.integers(0, len(expected)))
        for _ in range(position):
            next(iterator)
        state = json.loads(json.dumps(whole.state_dict()))
        resumed = make(IndexSampler(costs, float, ranks, 0))
        resumed.load_state_dict(state)
        assert resumed.epoch == 4
        resumed.set_epoch(4)  # as loops do at the start of each epoch
        assert len(resumed) == len(expected)
        assert resumed.state_dict() == state
        assert list(resumed) == expected[position:]
        assert list(resumed) == expected
        resumed.load_state_dict(state)
        resumed.set_epoch(5)
        whole.set_epoch(5)
        assert resumed.state_dict()["position"] == 0
        assert list(resumed) == list(whole)


def test_a_data_loader_without_workers_is_where_its_sampler_is() -> None:
    sampler = IndexSampler(range(20), float, 2, 1)
    loader = DataLoader(list(range(20)), batch_size=3, sampler=sampler)  # type: ignore[arg-type]
    whole = [batch.tolist() for batch in loader]
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    assert sampler.state_dict()["position"] == 6
    sampler.load_state_dict(sampler.state_dict())
    assert [batch.tolist() for batch in loader] == whole[2:]


def test_a_data_loader_with_workers_continues_where_it_is_told() -> None:
    # It makes two iterators of the sampler, and uses the second.
    data: Any = list(range(20))
    batches = BatchSampler(IndexSampler(data, float, 2, 1), lambda indices: [indices[:4], indices[4:]])
    indices = IndexSampler(data, float, 2, 1)
    for sampler, options in (
        (batches, {"batch_sampler": batches}),
        (indices, {"sampler": indices, "batch_size": None}),
    ):
        whole = [torch.as_tensor(one).tolist() for one in DataLoader(data, **options)]
        sampler.load_state_dict({**sampler.state_dict(), "position": 1})
        loader = DataLoader(data, num_workers=1, **options)
        assert [torch.as_tensor(one).tolist() for one in loader] == whole[1:]
        assert [torch.as_tensor(one).tolist() for one in loader] == whole


def test_a_state_of_another_order_is_refused() -> None:
    sampler = IndexSampler(range(20), float, 2, 1)
    other = IndexSampler(range(20), float, 4, 1, seed=3)
    with pytest.raises(ValueError, match=r"num_replicas is 2, was 4, seed is 0, was 3\.\nIt was saved"):
        sampler.load_state_dict(other.state_dict())
    for position in (-1, 11):
        with pytest.raises(ValueError, match=f"position is {position}, must be between 0 and 10"):
            sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": position})
    assert sampler.epoch == 0
    assert len(list(sampler)) == 10


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_replicas": 0}, "num_replicas is 0, must be at least 1"),
        ({"rank": 2}, "rank is 2, must be between 0 and 1"),
        ({"rank": -1}, "rank is -1"),
        ({"random_level": 1.5}, r"random_level is 1\.5, must be between 0 and 1"),
        ({"complexity_fn": lambda _: float("nan")}, r"returned nan for dataset\[0\]; costs must be finite"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        IndexSampler(**{"dataset": [1, 2], "complexity_fn": float, "num_replicas": 2, "rank": 0, **options})


def test_arguments_of_other_types() -> None:
    with pytest.raises(TypeError, match=r"returned '1' for dataset\[0\], a str; it must return a number"):
        IndexSampler([1], str, 1, 0)  # type: ignore[arg-type]
    for cost in (torch.ones(2), np.ones(0), torch.tensor(1j), torch.ones((), device="meta")):
        with pytest.raises(TypeError, match=r"for dataset\[1\], a (Tensor|ndarray); it must return a number"):
            _samplers([1, cost], 1)
    for bad in (torch.tensor(float("nan")), np.float32("inf"), -float("inf")):
        with pytest.raises(ValueError, match=r"returned .*(nan|inf).* for dataset\[1\]; costs must be finite"):
            _samplers([1, bad], 1)
    with pytest.raises(TypeError, match="sampler is a list, must be a LoadBalancingDistributedSampler"):
        BatchSampler([1], lambda one: [one])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drop_last is True, must be False"):
        BatchSampler(IndexSampler([1], float, 1, 0, drop_last=True), lambda one: [one])
    with pytest.raises(RuntimeError, match=r"not both given, and torch\.distributed is not initialized"):
        IndexSampler([1], float, num_replicas=1)


def test_a_rank_that_has_nothing_to_repeat_is_named() -> None:
    def odd(indices: list[int]) -> list[list[int]]:
        return [[index] for index in indices if index % 2]

    sampler = IndexSampler(range(8), float, 2, 0)
    with pytest.raises(ValueError, match="batch_fn gave no batches for rank 0, and 4 for rank 1"):
        len(BatchSampler(sampler, odd))
    assert list(BatchSampler(sampler, odd, drop_last=True)) == []


# As those of Accelerate: each gives the batches of one process out of those that the sampler gives.
SPLITTERS = """
class BatchSamplerShard:
    def __init__(self, batches): self.batches = batches
    def __len__(self): return len(self.batches) // 2
    def __iter__(self): yield from list(self.batches)[::2]

class DataLoaderDispatcher(BatchSamplerShard):
    def __iter__(self): return self._fetch_batches()
    def _fetch_batches(self): yield from list(self.batches)[::2]

class DataLoaderShard:
    def __init__(self, batches): self.batches = batches
    def __iter__(self): yield from self.batches
"""


def test_accelerate_does_not_split_the_share_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("accelerate.data_loader")
    exec(SPLITTERS, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sampler, whole = (IndexSampler([1, 2, 3, 4], float, ranks, 0) for ranks in (2, 1))
    batches = BatchSampler(sampler, lambda own: [own])
    for share in (torch.utils.data.BatchSampler(sampler, 1, False), batches):
        for splitter in (module.BatchSamplerShard, module.DataLoaderDispatcher):
            with pytest.raises(RuntimeError, match=r"rank 0 once more(.|\n)*prepare_data_loader\(loader"):
                list(splitter(share))
        assert list(module.DataLoaderShard(share)) == list(share)
    # Who gives all samples leaves the splitting to Accelerate.
    assert len(list(module.BatchSamplerShard(torch.utils.data.BatchSampler(whole, 1, False)))) == 2


def test_what_the_first_sampler_showed() -> None:
    dataset = [3, 1, 2]
    sampler = IndexSampler(dataset, float, 2, 1, drop_last=True)
    assert sampler.dataset is dataset
    assert (sampler.num_samples, sampler.total_size, sampler.epoch, sampler.rank) == (1, 2, 0, 1)
    assert isinstance(sampler, torch.utils.data.DistributedSampler)


@on_ranks(3)
def test_rank_and_world_size_are_those_of_the_job(rank: int) -> None:
    assert (
        list(LoadBalancingDistributedSampler(range(8), float, shuffle=False)) == [[0, 3, 6], [1, 4, 7], [2, 5, 0]][rank]
    )


def _printed() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        load_script("examples/train_unequal_lengths.py").main()
    return printed.getvalue()


def test_the_example_learns_and_is_balanced() -> None:
    printed, nothing = run_ranks(2, _printed)
    assert nothing == ""
    found = re.fullmatch(r"test accuracy ([0-9.]+)%, busiest rank ([0-9.]+) x the mean\n", printed)
    assert found is not None, printed
    assert float(found[1]) > 70
    assert 1 <= float(found[2]) < 1.05
