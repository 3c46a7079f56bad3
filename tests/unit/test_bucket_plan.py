"""Which parameters go into which bucket: properties of the plan for any list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua.engine.bucket_plan import plan_buckets

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
TENSORS = st.lists(st.builds(torch.empty, st.integers(0, 50), dtype=DTYPES, device=st.just("meta")), max_size=40)
LIMITS = st.integers(1, 300)


@dataclass
class Group:
    """What the plan says about one bucket."""

    tensors: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def groups_of(tensors: list[torch.Tensor], plan: list[list[int]]) -> list[Group]:
    return [Group([tensors[index] for index in indices]) for indices in plan]


@given(TENSORS, LIMITS, st.none() | LIMITS)
def test_every_tensor_is_in_one_bucket_of_its_dtype(tensors: list[torch.Tensor], limit: int, first: int | None) -> None:
    plan = plan_buckets(tensors, limit, first)
    assert sorted(index for group in plan for index in group) == list(range(len(tensors)))
    for indices, group in zip(plan, groups_of(tensors, plan), strict=True):
        assert indices == sorted(indices)
        assert len({tensor.dtype for tensor in group.tensors}) == 1


@given(TENSORS, LIMITS)
def test_a_bucket_ends_with_the_tensor_that_reaches_the_limit(tensors: list[torch.Tensor], limit: int) -> None:
    plan = plan_buckets(tensors, limit)
    groups = groups_of(tensors, plan)
    for group in groups:
        assert Group(group.tensors[:-1]).bytes < limit
    for dtype in {tensor.dtype for tensor in tensors}:
        of_dtype = [group for group in groups if group.tensors[0].dtype == dtype]
        assert sum(group.bytes < limit for group in of_dtype) <= 1, "only the last one may be smaller"
        assert all(group.bytes >= limit for group in of_dtype[:-1])


@given(TENSORS, LIMITS)
def test_buckets_come_in_the_order_in_which_they_are_complete(tensors: list[torch.Tensor], limit: int) -> None:
    ends = [group[-1] for group in plan_buckets(tensors, limit)]
    assert ends == sorted(ends)


@given(TENSORS, LIMITS, LIMITS)
def test_the_first_bucket_has_its_own_limit(tensors: list[torch.Tensor], limit: int, first: int) -> None:
    plan = plan_buckets(tensors, limit, first)
    whole = [group for group in groups_of(tensors, plan) if group.bytes >= first]
    if whole:
        # Whichever group is complete first is closed by the first limit, of which no tensor but its last is too much.
        assert min(Group(group.tensors[:-1]).bytes for group in whole) < first


def test_examples() -> None:
    def f32(count: int) -> torch.Tensor:
        return torch.empty(count)

    half = torch.empty(4, dtype=torch.float16)
    assert plan_buckets([], 100) == []
    assert plan_buckets([f32(10), f32(10), f32(10)], 80) == [[0, 1], [2]]
    assert plan_buckets([f32(10), f32(10), f32(10)], 80, first_bucket_bytes=1) == [[0], [1, 2]]
    assert plan_buckets([f32(10), f32(10)], 80, first_bucket_bytes=1) == [[0, 1]]  # on CPUs, all that fits into one
    on_gpu = [torch.empty(10, device="meta")] * 2
    assert plan_buckets(on_gpu, 80, first_bucket_bytes=1) == [[0], [1]]
    assert plan_buckets([f32(100), f32(1), f32(1)], 80) == [[0], [1, 2]]
    # Unless it is said: 25 MiB on CPUs, and elsewhere 50.
    assert plan_buckets([torch.empty(26 << 18), f32(1)]) == [[0], [1]]
    assert plan_buckets([torch.empty(size << 18, device="meta") for size in (26, 26, 1)]) == [[0, 1], [2]]
    # The rare dtype is complete when the list ends; it does not hold back those before it.
    assert plan_buckets([half, f32(20), f32(20), half, f32(1)], 80) == [[1], [2], [0, 3], [4]]


@pytest.mark.parametrize(("limit", "first"), [(0, None), (-1, None), (10, 0)])
def test_a_limit_below_one_byte_is_refused(limit: int, first: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        plan_buckets([torch.empty(1)], limit, first)
