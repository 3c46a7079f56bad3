"""Sums over ranks on CPU by messages from each to each: the values, the bits, the memory and when they are sent."""

from __future__ import annotations

import itertools
import os
from functools import reduce

import pytest
import torch
from support.messages import counted_messages
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.sweeps import rest_is_deep
from support.training import begin
from torch import Tensor

import bagua.torch_api as bagua
from bagua.collectives.communicator import BaguaCommunicator
from bagua.collectives.object_collectives import all_gather_object
from bagua.collectives.process_group import _get_default_group
from bagua.comm_ops import all_reduce
from bagua.comm_ops.all_reduce import sum_over_ranks

pytestmark = pytest.mark.skipif(
    os.environ.get("BAGUA_TEST_DEVICE") == "cuda", reason="on GPUs NCCL's all-reduce is always used"
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
# Less than a value for each rank, parts of several lengths, several slices, several windows.
LENGTHS = (1, 2, 7, 100, 1000, 5003)


def _values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    real = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(length, generator=generator, dtype=real).to(dtype)


def _expected(ranks: int, length: int, dtype: torch.dtype, window: int) -> Tensor:
    """Each part is added from its owner on, from left to right."""
    every = [_values(rank, length, dtype) for rank in range(ranks)]
    windows = []
    for parts in zip(*(one.split(window) for one in every), strict=True):
        by_rank = [part.tensor_split(ranks) for part in parts]
        for owner in range(ranks):
            versions = [by_rank[(owner + distance) % ranks][owner] for distance in range(ranks)]
            windows.append(reduce(torch.add, versions))
    return torch.cat(windows)


def _check_sums(group: BaguaCommunicator) -> None:
    all_reduce.DIRECT_BYTES, all_reduce.SLICE_BYTES, all_reduce.WINDOW_BYTES = 0, 256, 8192
    for dtype in DTYPES:
        for length in LENGTHS:
            values = _values(group.rank(), length, dtype)
            sum_over_ranks(values, group)
            expected = _expected(group.nranks(), length, dtype, 8192 // dtype.itemsize)
            assert torch.equal(values, expected), (dtype, length)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks(fresh=True)
def test_every_rank_has_the_sum_to_the_bit() -> None:
    _check_sums(_get_default_group().get_global_communicator())


@on_ranks(4, fresh=True)
def test_a_group_of_some_ranks(rank: int) -> None:
    group = bagua.communication.new_group([1, 3])
    if rank in (1, 3):
        _check_sums(group.get_global_communicator())


def _messages(values: Tensor) -> tuple[int, list[int]]:
    begin()
    group = _get_default_group().get_global_communicator()
    expected = values * group.nranks()
    with counted_messages() as sizes:
        sum_over_ranks(values, group)
    assert torch.equal(values, expected)
    return group.rank(), sizes


def _sums_in_a_grid() -> list[int]:
    rank, _ = begin()
    group = _get_default_group().get_global_communicator()
    ranks = group.nranks()
    kept = all_reduce.DIRECT_RANKS, all_reduce.DIRECT_BYTES, all_reduce.SLICE_BYTES, all_reduce.WINDOW_BYTES
    all_reduce.DIRECT_RANKS, all_reduce.DIRECT_BYTES = 3, 0
    all_reduce.SLICE_BYTES, all_reduce.WINDOW_BYTES = 256, 8192
    for length, dtype in zip(LENGTHS, itertools.cycle((torch.float16, torch.float32, torch.complex64)), strict=False):
        values = _values(rank, length, dtype)
        whole = (values.real * 4).round().to(dtype)  # sums of these are exact, in any order
        expected = sum((_values(one, length, dtype).real * 4).round().to(dtype) for one in range(ranks))
        sum_over_ranks(whole, group)
        assert torch.equal(whole, expected), (dtype, length)
        sum_over_ranks(values, group)
        assert all(torch.equal(values, one) for one in all_gather_object(values)), (dtype, length)
    all_reduce.SLICE_BYTES, all_reduce.WINDOW_BYTES = kept[2:]
    with counted_messages() as sizes:
        sum_over_ranks(torch.ones(12), group)
    all_reduce.MOST_PEERS, kept_peers = 1, all_reduce.MOST_PEERS
    with counted_messages() as none:
        sum_over_ranks(torch.ones(12), group)
    assert none == []
    all_reduce.MOST_PEERS = kept_peers
    all_reduce.DIRECT_RANKS, all_reduce.DIRECT_BYTES = kept[:2]
    return sizes


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    rest_is_deep([(4, [24] + [12] * 2 + [24]), (6, [16] * 2 + [8] * 2 + [16] * 2), (5, [12] * 2)], 0, 2),
)
def test_many_ranks_sum_over_rows_and_columns(ranks: int, sizes: list[int]) -> None:
    results = run_ranks(ranks, _sums_in_a_grid)
    if ranks == 5:  # no divisors: with each of the four others
        assert all(len(one) == 8 for one in results)
    else:
        assert results == [sizes] * ranks


MIB = 1 << 20


@pytest.mark.parametrize(
    ("values", "sizes"),
    [
        (torch.ones(MIB // 4), [MIB // 2] * 2),
        (torch.ones(MIB // 4 - 1), []),
        (torch.ones(2 * MIB), [2 * MIB, 2 * MIB] * 2),
        (torch.ones(MIB, dtype=torch.int32), []),
    ],
    ids=["1 MiB", "less", "slices", "integers"],
)
def test_much_goes_by_messages_and_little_by_a_collective(values: Tensor, sizes: list[int]) -> None:
    assert [one for _, one in run_ranks(2, _messages, values)] == [sizes, sizes]


@pytest.mark.parametrize("average", [True, False])
@on_ranks(2)
def test_gradients_of_large_buckets_go_by_messages(rank: int, average: bool) -> None:
    net: torch.nn.Module = torch.nn.Linear(512, 512, bias=False)
    torch.nn.init.constant_(net.weight, 0.5)
    algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce", average=average)
    model = net.with_bagua([torch.optim.SGD(net.parameters(), lr=1.0)], algorithm)
    for _ in range(2):
        model.zero_grad()
        with counted_messages() as sizes:
            model(torch.full((1, 512), float(rank + 1))).sum().backward()
        assert torch.equal(net.weight.grad, torch.full((512, 512), 1.5 if average else 3.0))
    assert sizes == [MIB // 2] * 2
