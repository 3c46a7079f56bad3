"""Several tensors handled as one flat tensor. Pure functions; any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = [
    "apply_flattened_call",
    "apply_flattened_call_all",
    "check_contiguous",
    "flatten",
    "get_flattened_tensor",
    "to_bagua_datatype",
    "unflatten",
]

flatten: Callable[[Sequence[Tensor]], Tensor] = _flatten_dense_tensors
unflatten: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors

# What Bagua 0.9 could communicate.
_DATATYPES = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int64: "i64"}


@torch.no_grad()
def apply_flattened_call(
    bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """
    Change tensors, in place, through a flat copy of all of them.

    Args:
        bucket: dense tensors of one dtype and device.
        call: is given the flat copy, 1-D, and changes it in place. After `torch.distributed.all_reduce` itself the copy
            is divided by the number of ranks.
        extra_args: further arguments for `call`.
    """
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, changed in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(changed)


def apply_flattened_call_all(tensors: Iterable[Tensor], call: Callable[..., Any]) -> None:
    """`apply_flattened_call` for the tensors of each dtype and device, in the order of the first of each."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in by_kind.values():
        apply_flattened_call(group, call)


def check_contiguous(tensors: Iterable[Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before it ends."""
    end = None
    for tensor in tensors:
        if end is not None and tensor.data_ptr() != end:
            return False
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return True


def get_flattened_tensor(tensors: Sequence[Tensor]) -> Tensor | None:
    """A new 1-D tensor with the elements of all, of the dtype and on the device of the first; None without tensors."""
    if not tensors:
        return None
    first = tensors[0]
    return torch.cat([tensor.reshape(-1).to(first.device, first.dtype) for tensor in tensors])


def to_bagua_datatype(datatype: torch.dtype) -> str:
    """
    The name of a dtype in Bagua 0.9: "f32", "f16", "u8" or "i64".

    Raises:
        ValueError: another dtype, which has none.
    """
    if datatype not in _DATATYPES:
        raise ValueError(f"{datatype} has no name in Bagua 0.9; there are {', '.join(map(str, _DATATYPES))}")
    return _DATATYPES[datatype]
