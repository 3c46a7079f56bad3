"""What the wrapper does at the end of a backward pass: it steps optimizers, and leaves out parameters.

torch.distributed.optim._apply_optimizer_in_backward makes optimizers that step in the backward pass. torch puts each on
its parameter, with a hook that steps when the gradient has been accumulated. That would be before the gradients are
communicated. So the hooks of parameters that are synchronized are taken away, and the optimizers step at the end of the
backward pass, after the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from bagua.engine.data_parallel import DataParallelEngine
from bagua.torch_api.data_parallel.arguments import refuse_without_gradients

if TYPE_CHECKING:
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


def leave_out_unused_after_first_pass(engine: DataParallelEngine) -> None:
    """skip_all_reduce_unused_params: what no rank uses in the first backward pass is not communicated from then on.

    Once, at the end of the first backward pass that communicates: with `find_unused_parameters`, the ranks have agreed
    on what is used by then. Without it, every parameter is."""

    def leave_out() -> None:
        engine.after_backward.remove(leave_out)
        setup = engine.setup
        if setup.find_unused_parameters:
            used = {name for name, _ in engine.bagua_build_params()}
            unused = frozenset(name for name, _ in engine.synchronized_parameters if name not in used)
            # Parameters that are used may still be used by some ranks only: these go on agreeing on that.
            engine.replan(replace(setup, left_out=unused))

    engine.after_backward.append(leave_out)
