"""The arguments of compressions: vectors of elements, and rows of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def _check_is_bytes(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.uint8:
        raise TypeError(f"{name} is {_described(tensor)}; give a tensor of torch.uint8")


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    layout = "" if value.is_contiguous() else ", not contiguous"
    return f"{value.dtype} {list(value.shape)} on {value.device}{layout}"
