"""What draws of collectives (test_collectives_drawn.py, test_reductions_drawn.py) do not reach."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from support.collective_model import assert_same
from support.rank_tests import on_ranks
from support.ranks import run_ranks

import bagua.torch_api as bagua


@on_ranks(3)
def test_source_and_destination_may_share_memory(rank: int, device: torch.device) -> None:
    """Source and destination overlap, equal or shifted."""
    ranks = 3
    whole = torch.arange(float(2 * ranks), device=device) + 100 * rank
    bagua.allgather(whole[2 * rank : 2 * rank + 2], whole)
    expected = torch.tensor([100.0 * (i // 2) + i for i in range(2 * ranks)])
    assert_same(whole, expected, "allgather")
    shifted = torch.arange(10.0, device=device)
    bagua.allreduce(shifted[:8], shifted[2:])
    assert_same(shifted, torch.cat([torch.arange(2.0), ranks * torch.arange(8.0)]), "shifted allreduce")
    chunks = torch.arange(float(ranks), device=device) + 10 * rank
    bagua.alltoall(chunks, chunks)
    assert_same(chunks, torch.arange(ranks) * 10.0 + rank, "alltoall")
    summed = torch.arange(float(ranks), device=device)
    bagua.reduce_scatter(summed, summed[-1:])
    assert_same(summed[-1:], torch.tensor([float(ranks * rank)]), "reduce_scatter")


@on_ranks(2)
def test_operations_may_be_numbers_or_those_of_torch(rank: int, device: torch.device) -> None:
    """By the numbers of the original interface, and as torch calls them."""
    results = []
    for op in (3, 10, dist.ReduceOp.MIN, dist.ReduceOp(dist.ReduceOp.PRODUCT)):
        tensor = torch.tensor([rank + 2.0], device=device)
        bagua.allreduce_inplace(tensor, op)  # type: ignore[arg-type]
        results.append(tensor.item())
    assert results == [3.0, 2.5, 2.0, 6.0]


@on_ranks(2)
def test_one_element_counts_as_contiguous_whatever_its_stride_is(rank: int, device: torch.device) -> None:
    single = torch.tensor([rank + 1, 9], device=device)[:1].as_strided((1,), (2,))
    bagua.broadcast(single, 1)
    assert_same(single, torch.tensor([2]), "broadcast of one element")


@on_ranks(2)
def test_parameters_can_be_communicated(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    bagua.allreduce_inplace(parameter)
    bagua.broadcast(parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.tolist() == [2.0] * 3


def wait_for_each_other() -> list[float]:
    """When this rank has come to the barrier, and when it has left it."""
    bagua.init_process_group()
    bagua.barrier()
    time.sleep(0.5 * bagua.get_rank())
    come = time.monotonic()
    with torch.device("meta"):
        bagua.barrier()
    return [come, time.monotonic()]


def test_a_barrier_waits_whatever_the_default_device_is() -> None:
    times = run_ranks(2, wait_for_each_other)
    assert min(left for _, left in times) >= max(come for come, _ in times)
