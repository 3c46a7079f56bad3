"""The mean of replicas that differ, from their files: one file at a time is in memory in addition to the sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua.torch_api.checkpoint import layout
from bagua.torch_api.checkpoint.contents import ABOUT


def mean_of_replicas(folder: Path, world_size: int, read: Callable[[str], Any]) -> dict[str, Any]:
    """
    Floating-point tensors of model and optimizer become the mean over the ranks, computed in float32 at least; the rest
    is that of rank 0. The same bits wherever it is called.

    Args:
        folder: of the checkpoint, for errors.
        world_size: how many replicas there are.
        read: of the folder's file of this name.

    Raises:
        ValueError: the files differ in more than values.
    """
    total: dict[str, Any] = {}
    for rank in range(world_size):
        state = read(layout.MODEL_FILE if rank == 0 else layout.replica_file(rank))
        about = state.pop(ABOUT)
        try:
            total = _mapped(state, None, _widened) if rank == 0 else _mapped(total, state, _added)
        except (KeyError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(f"the replicas of ranks 0 and {rank} in {folder} differ in more than values") from error
        if rank == 0:
            first, first_about = state, about
    mean: dict[str, Any] = _mapped(total, first, lambda one, like: _narrowed(one, like, world_size))
    # No algorithm's state: it begins anew.
    mean[ABOUT] = {**first_about, "engine": None}
    return mean


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _widened(one: Tensor, _: Any) -> Tensor:
    return one.to(torch.promote_types(one.dtype, torch.float32)) if _is_averaged(one) else one


def _added(total: Tensor, one: Tensor) -> Tensor:
    return total + one if _is_averaged(total) else total


def _narrowed(total: Tensor, like: Tensor, count: int) -> Tensor:
    return (total / count).to(like.dtype) if _is_averaged(total) else total


def _mapped(one: Any, other: Any, function: Callable[[Tensor, Any], Tensor]) -> Any:
    """`one` with each tensor replaced; `other` has the same structure, or is None."""
    if isinstance(one, Tensor):
        return function(one, other)
    if isinstance(one, dict):
        return {key: _mapped(value, None if other is None else other[key], function) for key, value in one.items()}
    if isinstance(one, list | tuple):
        return type(one)(
            _mapped(value, None if other is None else other[index], function) for index, value in enumerate(one)
        )
    return one
