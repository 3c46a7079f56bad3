"""The reductions, what each means for each dtype, and which of them a backend does by itself.

Pure functions; any thread.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist


class ReduceOp(enum.IntEnum):
    """
    How the elements of all ranks become one. The numbers are those of the original interface.

    Integers wrap around. AVG is SUM divided by the number of ranks; of integers the quotient loses its fraction
    (towards zero), as in NCCL. BOR, BAND and BXOR are for integers and bool, MIN and MAX not for complex numbers. For
    bool SUM and MAX mean "any", PRODUCT and MIN mean "all", and AVG nothing.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10

    @property
    def torch_op(self) -> dist.ReduceOp.RedOpType:
        """Of torch.distributed."""
        operation: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, self.name)
        return operation


_BITWISE = frozenset({ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR})
_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG})

# dtypes that gloo and NCCL both compute with.
_NUMBERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
# dtypes that neither computes with, but we do.
_FOLDED_INTEGERS = frozenset({torch.int16})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
REDUCIBLE_DTYPES = _NUMBERS | _INTEGERS | _FOLDED_INTEGERS | _COMPLEX | _FLOAT8 | {torch.bool}

# As reductions of the bytes 0 and 1. A sum of bytes would leave a bool that is neither.
_OF_BOOL = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.BOR: ReduceOp.BOR,
    ReduceOp.BAND: ReduceOp.BAND,
    ReduceOp.BXOR: ReduceOp.BXOR,
}

# AVG and reduce_scatter of gloo depend on the version of torch, so gloo counts as having neither.
_NATIVE_OPS = {
    "gloo": _ARITHMETIC - {ReduceOp.AVG} | _BITWISE,
    "nccl": _ARITHMETIC,
}
_OPS_OF_OTHER_BACKENDS = _ARITHMETIC - {ReduceOp.AVG}


@dataclass(frozen=True)
class Reduction:
    """
    How one reduction is carried out: on `dtype`, a view of the caller's, by the backend's own `op`, then divided by
    the number of ranks if `divides`; or, if not `is_native`, by bringing the elements together and folding them here.
    """

    dtype: torch.dtype
    op: ReduceOp
    is_native: bool
    divides: bool = False


def plan_reduction(dtype: torch.dtype, op: ReduceOp, backend: str) -> Reduction:
    """
    Args:
        backend: what carries it out, "gloo" or "nccl"; of any other only sum, product, minimum and maximum are asked.

    Raises:
        TypeError: the reduction means nothing for this dtype.
    """
    if not is_meaningful(dtype, op):
        allowed = ", ".join(other.name for other in ReduceOp if is_meaningful(dtype, other)) or "no reduction"
        raise TypeError(f"{op.name} of {dtype} is not defined; for this dtype there is {allowed}")
    if dtype == torch.bool:
        dtype, op = torch.uint8, _OF_BOOL[op]
    elif dtype.is_complex and op in (ReduceOp.SUM, ReduceOp.AVG):
        dtype = dtype.to_real()
    native_ops = _NATIVE_OPS.get(backend, _OPS_OF_OTHER_BACKENDS)
    if dtype not in _NUMBERS | _INTEGERS:
        return Reduction(dtype, op, is_native=False)
    if op == ReduceOp.AVG and op not in native_ops:
        return Reduction(dtype, ReduceOp.SUM, is_native=True, divides=True)
    return Reduction(dtype, op, is_native=op in native_ops)


def is_meaningful(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether `op` is defined for numbers of this type."""
    if dtype not in REDUCIBLE_DTYPES:
        return False
    if dtype == torch.bool:
        return op in _OF_BOOL
    if op in _BITWISE:
        return not dtype.is_floating_point and not dtype.is_complex
    return op not in (ReduceOp.MIN, ReduceOp.MAX) or not dtype.is_complex


def fold(contributions: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """
    Reduces [ranks, elements] to [elements], of the same dtype. Short floating-point types are computed in float32 and
    rounded once.
    """
    dtype = contributions.dtype
    is_short = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    wide = contributions.to(torch.float32) if is_short else contributions
    match op:
        case ReduceOp.SUM:
            result = wide.sum(0, dtype=wide.dtype)
        case ReduceOp.AVG:
            result = divide_(wide.sum(0, dtype=wide.dtype), len(wide))
        case ReduceOp.PRODUCT:
            result = wide.prod(0, dtype=wide.dtype)
        case ReduceOp.MIN:
            result = wide.amin(0)
        case ReduceOp.MAX:
            result = wide.amax(0)
        case ReduceOp.BOR:
            result = functools.reduce(torch.bitwise_or, wide.unbind())
        case ReduceOp.BAND:
            result = functools.reduce(torch.bitwise_and, wide.unbind())
        case ReduceOp.BXOR:
            result = functools.reduce(torch.bitwise_xor, wide.unbind())
    return result.to(dtype)


def divide_(total: torch.Tensor, ranks: int) -> torch.Tensor:
    """In place: a sum becomes an average. Integers lose the fraction."""
    is_exact = total.is_floating_point() or total.is_complex()
    return total.div_(ranks, rounding_mode=None if is_exact else "trunc")
