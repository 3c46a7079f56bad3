"""Counts a model's forward passes, by which all ranks know when weights are exact. Called by the thread that calls the
model; FSDP's all-gathers read it in that thread and in autograd's, within the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bagua.job.torch_internals import hide_from_compiler


class ForwardPasses:
    """
    Attributes:
        count: forward passes in training mode with gradients, from 1 in the first one.
    """

    def __init__(self, exact_every: int | None) -> None:
        self.count = 0
        self._before_each: Callable[[], None] = lambda: None
        self._exact_every = exact_every

    @property
    def is_exact(self) -> bool:
        """Whether the weights of the current pass are those of the shards."""
        return self._exact_every is not None and self.count % self._exact_every == 0

    def follow(self, model: nn.Module, before_each: Callable[[], None]) -> RemovableHandle:
        """Counts the passes of `model` from now on, before FSDP gathers what they need, and calls `before_each`."""
        self._before_each = before_each
        return model.register_forward_pre_hook(self._begin, prepend=True)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._before_each()
            self.count += 1


hide_from_compiler(ForwardPasses._begin)
