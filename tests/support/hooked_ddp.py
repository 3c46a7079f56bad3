"""torch's DDP with a communication hook that is watched, for use inside a rank (support.ranks)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from support.training import torch_ddp
from torch import Tensor, nn

Hook = Callable[..., Any]


class Recorder:
    """Stands between DDP and a hook, and keeps what each bucket held before it was communicated."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self.state, self.hook = state, hook
        self.buckets: list[tuple[list[Tensor], Tensor]] = []

    def start(self, bucket: Any) -> Any:
        self.buckets.append((bucket.parameters(), bucket.buffer().clone()))
        return self.hook(self.state, bucket)

    def taken(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(before, after) of each bucket of the last pass."""
        for parameters, before in self.buckets:
            yield before, torch.cat([parameter.grad.reshape(-1) for parameter in parameters])  # type: ignore[union-attr]
        self.buckets.clear()


def hooked(net: nn.Module, state: Any, hook: Hook, **options: Any) -> tuple[Any, Recorder]:
    model = torch_ddp(net, **options)
    recorder = Recorder(state, hook)

    # DDP asks for a function, whose annotations, if it has any, are its own.
    model.register_comm_hook(None, lambda _, bucket: recorder.start(bucket))
    return model, recorder
