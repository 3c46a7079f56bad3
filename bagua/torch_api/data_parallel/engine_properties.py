"""What algorithms and users read of a wrapper's engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from bagua.engine.bucket import Bucket
from bagua.engine.data_parallel import DataParallelEngine
from bagua.engine.parameters import replicated_parameters
from bagua.regroup.job_step import WorldChange

if TYPE_CHECKING:
    from bagua.torch_api.algorithms.base import AlgorithmImpl


class EngineProperties:
    """A base class of the wrapper."""

    module: nn.Module

    if TYPE_CHECKING:

        @property
        def inner(self) -> DataParallelEngine:
            """The engine of the module."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward communicates; see no_sync. May be set, as torch's: False while gradients are accumulated."""
        return self.inner.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, communicates: bool) -> None:
        self.inner.require_backward_grad_sync = bool(communicates)

    @property
    def step_was_dropped(self) -> bool:
        """Whether the last step was dropped, because the job has lost a rank (bagua.torch_api.Regroup)."""
        return self.inner.step_was_dropped

    def set_batch_weight(self, weight: float) -> None:
        """What this rank's batch counts for in the next backward pass, such as its number of samples: see
        bagua.engine.data_parallel.DataParallelEngine.set_batch_weight."""
        self.inner.set_batch_weight(weight)

    def on_regroup(self, callback: Callable[[WorldChange], object]) -> None:
        """Call `callback(change)` each time that the job goes on without ranks that it has lost."""
        self.inner.on_regroup(callback)

    @property
    def parameters_to_ignore(self) -> list[str]:
        """Names of parameters and buffers that are not synchronized."""
        return self.inner.parameters_to_ignore

    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are alike on all ranks, trained or frozen."""
        return replicated_parameters(self.module, self.inner.parameters_to_ignore)

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are synchronized, in the module's order."""
        return self.inner.bagua_build_params()

    @property
    def bagua_module_name(self) -> str:
        """The name by which the ranks know this module."""
        return self.inner.bagua_module_name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        """The algorithm at work."""
        algorithm: AlgorithmImpl = self.inner.bagua_algorithm
        return algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """The buckets, in launch order."""
        return self.inner.bagua_buckets

    @property
    def bagua_train_step_counter(self) -> int:
        """Forward passes in training so far."""
        return self.inner.bagua_train_step_counter
