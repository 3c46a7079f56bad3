"""The arguments of compressions: vectors of elements, and rows of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Sums and squares of these are computed in float32.
HALF_DTYPES = (torch.float16, torch.bfloat16)
# What can be compressed and decompressed.
FLOAT_DTYPES = (torch.float32, *HALF_DTYPES)


def check_vector(name: str, tensor: object, dtypes: Sequence[torch.dtype]) -> None:
    """
    Raises:
        TypeError: no tensor, or of another dtype.
        ValueError: not 1-D and contiguous.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {_described(tensor)}; give a tensor")
    if tensor.dtype not in dtypes:
        *first, last = map(str, dtypes)
        wanted = f"{', '.join(first)} or {last}" if first else last
        raise TypeError(f"{name} is {_described(tensor)}; give {wanted}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} is {_described(tensor)}; give a contiguous tensor of one dimension, e.g. view(-1)")


def elements_of_chunks(name: str, tensor: Tensor, chunks: int, may_be_padded: bool = True) -> int:
    """Of each.

    Raises:
        ValueError: the chunks do not divide the tensor.
    """
    elements, rest = divmod(tensor.numel(), chunks)
    if rest:
        shares = f"{chunks} chunks do not divide; pad it" if may_be_padded else f"the {chunks} chunks do not divide"
        raise ValueError(f"{name} has {tensor.numel()} elements, which {shares}")
    return elements


def rows_of(name: str, tensor: Tensor) -> int:
    """How many compressed chunks it is said to hold.

    Raises:
        TypeError: no tensor of uint8.
        ValueError: not of two dimensions, or without a row.
    """
    _check_is_bytes(name, tensor)
    if tensor.dim() != 2 or tensor.shape[0] < 1:
        raise ValueError(f"{name} is {_described(tensor)}; give two dimensions, one row for each compressed chunk")
    return tensor.shape[0]


def check_bytes(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """
    Raises:
        TypeError: no tensor of uint8.
        ValueError: of another shape, on another device, or not contiguous.
    """
    _check_is_bytes(name, tensor)
    if tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(f"{name} is {_described(tensor)}; give a contiguous torch.uint8 {list(shape)} on {device}")


def bytes_to_write(name: str, out: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """`out`, which is checked as by `check_bytes`; None: a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    check_bytes(name, out, shape, device)
    return out


def _check_is_bytes(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.uint8:
        raise TypeError(f"{name} is {_described(tensor)}; give a tensor of torch.uint8")


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.is_contiguous() else ", not contiguous"
    return f"{value.dtype} {list(value.shape)} on {value.device}{layout}"
