"""A module of which a loss may reach a part, and whose backward pass may raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PARTS = ("trunk", "left", "right")
HEADS = (("left", "right"), ("left",), ("right",))
# Where a backward pass raises: before any gradient is made, when those of the heads are, when all are.
PLACES = ("start", "middle", "end")


class Branching(nn.Module):
    """A trunk and two heads, of which a call takes one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(2, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(
        self,
        x: Tensor,
        heads: Sequence[str],
        on_hidden: Callable[[Tensor], object] | None = None,
        reentrant: bool | None = None,
    ) -> Tensor:
        """`reentrant`: heads are checkpointed, by that kind."""
        hidden = self.trunk(x)
        if on_hidden is not None:
            hidden.register_hook(on_hidden)
        total = torch.zeros(()).to(x.device)
        for head in heads:
            module, given = getattr(self, head), torch.tanh(hidden)
            total = total + (module(given) if reentrant is None else checkpoint(module, given, use_reentrant=reentrant))
        return total


def interrupt(_: Tensor) -> None:
    raise MemoryError
