"""Counts a model's forward passes, by which all ranks know when weights are exact. Called by the thread that calls the
model; FSDP's all-gathers read it in that thread and in autograd's, within the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bagua.fsdp.torch_internals import outermost_sharded
from bagua.job.torch_internals import hide_from_compiler


class ForwardPasses:
    """
    Attributes:
        count: forward passes in training mode with gradients, from 1 in the first one.
    """

    def __init__(self, exact_every: int | None) -> None:
        self.count = 0
        self._before_each: Callable[[], None] = lambda: None
        self._is_called = False
        self._parts: set[nn.Module] = set()
        self._exact_every = exact_every

    @property
    def is_exact(self) -> bool:
        """Whether the weights of the current pass are those of the shards."""
        return self._exact_every is not None and self.count % self._exact_every == 0

    def follow(self, model: nn.Module, before_each: Callable[[], None]) -> Callable[[], None]:
        """Counts the passes of `model` from now on, before FSDP gathers what they need, and calls `before_each`.

        Of a model that is never called itself, such as a LightningModule, a pass begins with the first of its outermost
        sharded modules that is called, and with one that was called in this pass already.

        Returns:
            what ends that.
        """
        self._before_each = before_each
        hooks = [model.register_forward_pre_hook(self._begin, prepend=True)]
        parts = (module for module in outermost_sharded(model) if module is not model)
        hooks += [module.register_forward_pre_hook(self._begin_part, prepend=True) for module in parts]

        def end() -> None:
            for hook in hooks:
                hook.remove()

        return end

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        self._is_called = True
        self._count(model)

    def _begin_part(self, module: nn.Module, inputs: Any) -> None:
        if self._is_called:
            return
        if not self._parts or module in self._parts:
            self._parts.clear()
            self._count(module)
        self._parts.add(module)

    def _count(self, module: nn.Module) -> None:
        if module.training and torch.is_grad_enabled():
            self._before_each()
            self.count += 1


hide_from_compiler(ForwardPasses._begin)
hide_from_compiler(ForwardPasses._begin_part)
