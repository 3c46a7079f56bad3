"""Optimizers that step in the backward pass, as torch.distributed.optim._apply_optimizer_in_backward makes them.

torch puts each optimizer on its parameter, with a hook that steps when the gradient has been accumulated. That would be
before the gradients are communicated. So the hooks of parameters that are synchronized are taken away, and the
optimizers step at the end of the backward pass, after the communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagua.torch_api.data_parallel.arguments import refuse_without_gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from bagua.engine.data_parallel import DataParallelEngine
    from bagua.torch_api.algorithms.base import Algorithm

_OPTIMIZERS = "_in_backward_optimizers"


class OptimizersInBackward:
    """
    Args:
        parameters: those that are synchronized; their hooks are taken away.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        from torch.distributed.optim import apply_optimizer_in_backward

        handles: Any = apply_optimizer_in_backward.param_to_optim_hook_handle_map
        self._parameters: list[Any] = [one for one in parameters if hasattr(one, _OPTIMIZERS)]
        for parameter in self._parameters:
            for handle in handles.pop(parameter, ()):
                handle.remove()

    def step(self) -> None:
        """All of them whose parameter has a gradient, which is dropped, as torch does."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in getattr(parameter, _OPTIMIZERS):
                    optimizer.step()
                parameter.grad = None


def take_over_optimizers(engine: DataParallelEngine, algorithm: Algorithm) -> None:
    """Let the engine step optimizers that step in the backward pass, if there are any.

    Raises:
        NotImplementedError: the algorithm does not only average gradients.
    """
    parameters = [parameter for _, parameter in engine.synchronized_parameters]
    if any(hasattr(one, _OPTIMIZERS) for one in parameters):
        refuse_without_gradients("optimizers in backward", algorithm, "Step the optimizers after the backward pass")
        engine.after_backward.append(OptimizersInBackward(parameters).step)
