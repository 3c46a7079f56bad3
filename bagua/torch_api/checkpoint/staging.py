"""Copies of a state, for a thread that writes it while training goes on. Functions; the thread that trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compact(state: Any) -> Any:
    """The same tensors, but copies of those that share memory with what is not saved: torch.save writes it all."""
    return _mapped(state, lambda tensor: tensor.detach().clone() if _is_part(tensor) else tensor.detach())


def staged(state: Any) -> tuple[Any, Callable[[], None]]:
    """
    A copy in the host's memory. Copies from a GPU are queued on the current stream, in front of whatever changes the
    tensors next: nobody waits here.

    Returns:
        the copy, and what waits until it is complete.
    """
    devices: set[torch.device] = set()

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.clone()
        devices.add(tensor.device)
        return tensor.to("cpu", non_blocking=True)  # into pinned memory

    result = _mapped(state, copied)
    events = [torch.cuda.current_stream(device).record_event() for device in devices if device.type == "cuda"]

    def wait() -> None:
        for event in events:
            with torch.cuda.device(event.device):  # this thread may use no GPU, and would begin to use the first one
                event.synchronize()

    return result, wait


def _is_part(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize


def _mapped(state: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Tensors that are the same remain the same: tied weights are written once."""
    known: dict[tuple[object, ...], Tensor] = {}

    def of_tensor(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.data_ptr() == 0:  # empty, or a subclass that wraps others
            return function(tensor)
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in known:
            known[key] = function(tensor)
        return known[key]

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return of_tensor(value)
        if isinstance(value, dict):
            result = copy.copy(value)
            for key, one in value.items():
                result[key] = walk(one)
            if hasattr(value, "_metadata"):  # versions of layers, which load_state_dict reads
                result._metadata = copy.deepcopy(value._metadata)  # type: ignore[attr-defined]
            return result
        if type(value) in (list, tuple):
            return type(value)(walk(one) for one in value)
        return copy.deepcopy(value)

    return walk(state)
