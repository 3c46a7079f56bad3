"""What a reduction means for a dtype, how it is carried out, and the folding of what no backend computes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.collective_model import REDUCTIONS, assert_reduced, contributions

from bagua.collectives.reduce_op import REDUCIBLE_DTYPES, ReduceOp, Reduction, fold, is_meaningful, plan_reduction
from bagua.comm_ops.centralized import AllReduce
from bagua.job import torch_internals

GPU = torch.device("cuda", 0)


def test_numbers_are_those_of_the_original_interface() -> None:
    assert {op.name: op.value for op in ReduceOp} == {
        "SUM": 0,
        "PRODUCT": 1,
        "MIN": 2,
        "MAX": 3,
        "BOR": 7,
        "BAND": 8,
        "BXOR": 9,
        "AVG": 10,
    }


@pytest.mark.parametrize(
    ("dtype", "meaningless"),
    [
        (torch.float32, {"BOR", "BAND", "BXOR"}),
        (torch.bfloat16, {"BOR", "BAND", "BXOR"}),
        (torch.float8_e5m2, {"BOR", "BAND", "BXOR"}),
        (torch.complex64, {"BOR", "BAND", "BXOR", "MIN", "MAX"}),
        (torch.int16, set()),
        (torch.bool, {"AVG"}),
        (torch.uint32, {op.name for op in ReduceOp}),
    ],
)
def test_what_means_nothing_is_refused(dtype: torch.dtype, meaningless: set[str]) -> None:
    assert {op.name for op in ReduceOp if not is_meaningful(dtype, op)} == meaningless
    for name in meaningless:
        with pytest.raises(TypeError, match=f"{name} of {dtype} is not defined"):
            plan_reduction(dtype, ReduceOp[name], "gloo")


@pytest.mark.parametrize(
    ("dtype", "op", "backend", "expected"),
    [
        (torch.float32, ReduceOp.SUM, "gloo", Reduction(torch.float32, ReduceOp.SUM, is_native=True)),
        (torch.float32, ReduceOp.AVG, "gloo", Reduction(torch.float32, ReduceOp.SUM, is_native=True, divides=True)),
        (torch.float32, ReduceOp.AVG, "nccl", Reduction(torch.float32, ReduceOp.AVG, is_native=True)),
        (torch.int32, ReduceOp.BOR, "gloo", Reduction(torch.int32, ReduceOp.BOR, is_native=True)),
        (torch.int32, ReduceOp.BOR, "nccl", Reduction(torch.int32, ReduceOp.BOR, is_native=False)),
        (torch.int16, ReduceOp.SUM, "gloo", Reduction(torch.int16, ReduceOp.SUM, is_native=False)),
        (torch.bool, ReduceOp.SUM, "nccl", Reduction(torch.uint8, ReduceOp.MAX, is_native=True)),
        (torch.bool, ReduceOp.BXOR, "nccl", Reduction(torch.uint8, ReduceOp.BXOR, is_native=False)),
        (torch.complex64, ReduceOp.AVG, "nccl", Reduction(torch.float32, ReduceOp.AVG, is_native=True)),
        (torch.complex64, ReduceOp.PRODUCT, "nccl", Reduction(torch.complex64, ReduceOp.PRODUCT, is_native=False)),
        # Of a backend that we know nothing about.
        (torch.float32, ReduceOp.SUM, "ucc", Reduction(torch.float32, ReduceOp.SUM, is_native=True)),
        (torch.int32, ReduceOp.BAND, "ucc", Reduction(torch.int32, ReduceOp.BAND, is_native=False)),
    ],
)
def test_plan(dtype: torch.dtype, op: ReduceOp, backend: str, expected: Reduction) -> None:
    assert plan_reduction(dtype, op, backend) == expected


def test_every_reducible_dtype_has_a_plan_on_every_backend() -> None:
    for dtype in REDUCIBLE_DTYPES:
        for op in ReduceOp:
            for backend in ("gloo", "nccl", "mpi"):
                if is_meaningful(dtype, op):
                    plan_reduction(dtype, op, backend)


@given(st.sampled_from(REDUCTIONS), st.integers(1, 5), st.integers(0, 30), st.integers(0, 2**32))
def test_fold(reduction: tuple[torch.dtype, ReduceOp], ranks: int, size: int, seed: int) -> None:
    """As the plan for a backend that can do nothing would use it."""
    dtype, op = reduction
    inputs = contributions(random.Random(seed), ranks, size, dtype)
    plan = plan_reduction(dtype, op, "gloo")
    result = fold(torch.stack([one.view(plan.dtype) for one in inputs]), ReduceOp.AVG if plan.divides else plan.op)
    assert_reduced(result.view(dtype), inputs, op, reduction)


def test_short_floats_are_rounded_once() -> None:
    """1 + 2**-8 twice over: bfloat16, which cannot hold 1 + 2**-8, would lose every one of them."""
    inputs = torch.tensor([[1.0], [2**-8], [2**-8]]).to(torch.bfloat16)
    assert fold(inputs, ReduceOp.SUM).item() == 1 + 2**-7


@pytest.mark.parametrize(
    ("device", "backend", "dtype", "ranks", "by_backend"),
    [
        (GPU, "nccl", torch.float32, 3, True),
        (GPU, "nccl", torch.complex64, 3, True),
        (GPU, "nccl", torch.bfloat16, 8, True),
        # NCCL has 1/n in the dtype, and 1/3 in bfloat16 is 0.334.
        (GPU, "nccl", torch.bfloat16, 3, False),
        (GPU, "nccl", torch.float16, 6, False),
        (GPU, "gloo", torch.float32, 2, False),
        (torch.device("cpu"), "gloo", torch.float32, 2, False),
    ],
)
def test_who_divides_by_the_number_of_ranks(
    device: torch.device, backend: str, dtype: torch.dtype, ranks: int, by_backend: bool, monkeypatch: Any
) -> None:
    """The backend, or whoever fills the bucket."""
    monkeypatch.setattr(torch_internals, "backend_name", lambda *_: backend)
    communicator: Any = SimpleNamespace(nranks=lambda: ranks, torch_group=None)
    operation = AllReduce(communicator, True, device, dtype)
    assert operation.prescale == (None if by_backend else 1 / ranks)
    assert (operation._options.reduceOp == dist.ReduceOp.AVG) == by_backend


def test_a_sum_is_not_divided() -> None:
    communicator: Any = SimpleNamespace(nranks=lambda: 3, torch_group=None)
    operation = AllReduce(communicator, False, GPU, torch.bfloat16)
    assert operation.prescale is None
    assert operation._options.reduceOp == dist.ReduceOp.SUM
