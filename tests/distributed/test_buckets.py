"""Buckets of the public kind: their memory, and each operation that can be appended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.training import NODES_OF_TWO_AND_ONE, begin, check_tensor_on_ranks, message_of

import bagua.torch_api.communication as communication
from bagua.collectives.process_group import to_bagua_process_group
from bagua.engine.comm_scheduler import CommScheduler
from bagua.torch_api.bucket import BaguaBucket


def _tensors(rank: int, device: torch.device, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Small integers, so that sums are exact; one of no dimension, one without elements."""
    generator = torch.Generator().manual_seed(rank)
    shapes: list[tuple[int, ...]] = [(3, 2), (), (0, 4), (7,)]
    return [
        torch.randint(-8, 8, shape, generator=generator).to(device, dtype).ensure_bagua_tensor(f"t{number}", "module")
        for number, shape in enumerate(shapes)
    ]


def _launch(bucket: BaguaBucket) -> None:
    scheduler = CommScheduler([bucket], to_bagua_process_group())
    for tensor in bucket.tensors:
        tensor.bagua_mark_communication_ready()
    scheduler.wait_pending_comm_ops()
    scheduler.close()


OPERATIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"average": False},
    "hierarchical": {"hierarchical": True},
    "hierarchical sum": {"hierarchical": True, "average": False},
    "scattergather": {"scattergather": True},
    "scattergather sum": {"scattergather": True, "average": False},
}


def _operation(options: dict[str, Any], flatten: bool, dtype: torch.dtype) -> None:
    rank, device = begin()
    ranks = dist.get_world_size()
    tensors = _tensors(rank, device, dtype)
    bucket = BaguaBucket(tensors, "a bucket", flatten, alignment=ranks if options.get("scattergather") else 1)
    assert bucket.append_centralized_synchronous_op(**options) is bucket
    for repetition in (1, 2):
        _launch(bucket)
        for number, tensor in enumerate(tensors):
            total = sum(_tensors(other, device, torch.float64)[number] for other in range(ranks))
            scale = 1 / ranks if options.get("average", True) else ranks ** (repetition - 1)
            # A mean of means is the mean; a sum of sums is not the sum.
            tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
            assert torch.allclose(tensor.double(), total * scale, **tolerance), (number, repetition)
            check_tensor_on_ranks(tensor, f"tensor {number}")


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_give_the_sum_or_the_mean(operation: str, flatten: bool) -> None:
    env = NODES_OF_TWO_AND_ONE if "hierarchical" in operation else None
    run_ranks(3, _operation, OPERATIONS[operation], flatten, torch.float32, env=env, reuse=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("operation", ["mean", "hierarchical", "scattergather"])
def test_operations_on_other_dtypes(operation: str, dtype: torch.dtype) -> None:
    run_ranks(2, _operation, OPERATIONS[operation], True, dtype, reuse=True)


@on_ranks(3)
def test_an_operation_of_some_ranks(rank: int, device: torch.device) -> None:
    pair = communication.new_group([0, 2])
    if rank == 1:
        return
    tensors = _tensors(rank, device)
    bucket = BaguaBucket(tensors, "b", True).append_centralized_synchronous_op(average=False, group=pair)
    _launch(bucket)
    expected = [sum(parts) for parts in zip(*(_tensors(other, device) for other in (0, 2)), strict=True)]
    for tensor, total in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, total)


def _uneven_share() -> str:
    rank, device = begin()
    bucket = BaguaBucket(_tensors(rank, device), "odd", True).append_centralized_synchronous_op(scattergather=True)
    return message_of(ValueError, lambda: _launch(bucket))


def test_what_cannot_be_done_is_refused() -> None:
    run_ranks(1, _bad_options)
    for message in run_ranks(3, _uneven_share):
        assert "'odd' has 14 elements" in message
        assert "alignment=3" in message


def _bad_options() -> None:
    rank, device = begin()
    bucket = BaguaBucket(_tensors(rank, device), "b", True)
    assert "'minmax'" in message_of(ValueError, lambda: bucket.append_centralized_synchronous_op(compression="minmax"))
    both = {"hierarchical": True, "scattergather": True}
    assert "exclude" in message_of(ValueError, lambda: bucket.append_centralized_synchronous_op(**both))
    assert not bucket.ops
