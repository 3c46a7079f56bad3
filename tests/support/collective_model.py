"""What collectives ought to give, computed with numpy from the inputs of all ranks.

Inputs come from generators that are seeded alike on all ranks, so that each rank knows what the others give.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bagua.collectives.reduce_op import ReduceOp, is_meaningful

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCED_DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, *FLOAT8, torch.bool)
# What does not compute travels all the same.
MOVED_DTYPES = (*REDUCED_DTYPES, torch.uint16, torch.uint32, torch.uint64)

REDUCTIONS = [(dtype, op) for dtype in REDUCED_DTYPES for op in ReduceOp if is_meaningful(dtype, op)]


def contributions(draw: random.Random, ranks: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """
    One input per rank. Integers of their whole range, so that sums wrap around. Floating-point numbers are small
    integers: sums and products of up to four of them are exact in every order.
    """
    generator = torch.Generator().manual_seed(draw.getrandbits(62))

    def one() -> torch.Tensor:
        if dtype == torch.bool:
            return torch.randint(0, 2, (size,), generator=generator).bool()
        if dtype.is_complex:
            parts = torch.randint(-2, 3, (2, size), generator=generator).to(dtype.to_real())
            return torch.complex(*parts)
        if dtype.is_floating_point:
            return torch.randint(-4, 5, (size,), generator=generator).to(torch.float32).to(dtype)
        raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype)

    return [one() for _ in range(ranks)]


def reduced(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction of all inputs."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        stacked = np.stack([one.numpy() for one in inputs])
        if op == ReduceOp.BXOR:
            return torch.from_numpy(np.asarray(stacked.sum(0) % 2 == 1))
        any_of = op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR)
        return torch.from_numpy(np.asarray(stacked.any(0) if any_of else stacked.all(0)))
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    values: NDArray[Any] = np.stack([one.to(wide).numpy() for one in inputs])
    results = {
        ReduceOp.SUM: lambda: values.sum(0),
        ReduceOp.AVG: lambda: values.sum(0),
        ReduceOp.PRODUCT: lambda: values.prod(0),
        ReduceOp.MIN: lambda: values.min(0),
        ReduceOp.MAX: lambda: values.max(0),
        ReduceOp.BOR: lambda: np.bitwise_or.reduce(values, 0),
        ReduceOp.BAND: lambda: np.bitwise_and.reduce(values, 0),
        ReduceOp.BXOR: lambda: np.bitwise_xor.reduce(values, 0),
    }
    result = torch.from_numpy(np.asarray(results[op]())).to(dtype)  # integers wrap around
    if op != ReduceOp.AVG:
        return result
    if dtype.is_floating_point or dtype.is_complex:
        return (result.to(wide) / len(inputs)).to(dtype)
    quotients = [abs(value) // len(inputs) * (1 if value >= 0 else -1) for value in result.flatten().tolist()]
    return torch.tensor(quotients, dtype=dtype).view(result.shape)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Bit for bit. Every NaN of a short floating-point type that travelled is the same NaN."""
    actual = actual.cpu()
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    actual_bytes, expected_bytes = (torch.cat([one.flatten()]).view(torch.uint8) for one in (actual, expected))
    assert torch.equal(actual_bytes, expected_bytes), f"{what}: got {actual}, expected {expected}"


def assert_reduced(actual: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp, what: object) -> None:
    """Exactly, but for averages of floating-point numbers: a backend may multiply by 1/n, and round on the way."""
    expected = reduced(inputs, op)
    if op == ReduceOp.AVG and (expected.is_floating_point() or expected.is_complex()):
        # Each of n terms and n sums is rounded, relative to what is in it and not to what is left of it.
        wide = torch.complex128 if expected.is_complex() else torch.float64
        magnitude = max(float(one.to(wide).abs().max()) for one in inputs) if expected.numel() else 0.0
        rounding = 2 * len(inputs) * torch.finfo(expected.dtype).eps * magnitude
        torch.testing.assert_close(
            actual.cpu().to(wide),
            expected.to(wide),
            rtol=0.0,
            atol=rounding,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )
    elif expected.dtype == torch.bool:
        assert_same(actual, expected, what)  # a byte of 2 would equal True
    else:
        # -0.0 and 0.0 are the same number: a product may be either.
        assert bool((actual.cpu() == expected).all()), f"{what}: got {actual}, expected {expected}"
