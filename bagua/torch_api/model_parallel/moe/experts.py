"""The experts of one rank. A module; its parameters are not synchronized."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """
    Args:
        expert: is copied for each.
        count: of this rank's experts.
    """

    def __init__(self, expert: nn.Module, count: int) -> None:
        super().__init__()
        self.bagua_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(count)])
        self._mark()

    def forward(self, tokens: Tensor) -> Tensor:
        """[experts, tokens, hidden] -> the same shape: row i by expert i."""
        return torch.stack([_only(expert(one)) for expert, one in zip(self.bagua_experts, tokens, strict=True)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # copies of parameters lose their attributes

    def _mark(self) -> None:
        for parameter in self.parameters():
            parameter.expert = True  # type: ignore[attr-defined]


def _only(output: Any) -> Tensor:
    """The first, where an expert returns several values."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
