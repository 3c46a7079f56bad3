"""What a reduction means for a dtype, how it is carried out, and the folding of what no backend computes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.collective_model import REDUCTIONS, assert_reduced, contributions

from bagua.collectives.reduce_op import REDUCIBLE_DTYPES, ReduceOp, Reduction, fold, is_meaningful, plan_reduction


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
