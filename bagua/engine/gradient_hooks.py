"""What runs when autograd has made a parameter's gradient: on autograd's thread, once per parameter and pass. And what
runs when the pass ends, and before an optimizer of which nobody knows.

The hooks refer to the steps weakly. A tensor's hooks are held by C++ where Python's collector does not look: through a
strong reference they, and with them the engine and the module that it trains, would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from bagua.engine.step_state import PassState
from bagua.job.torch_internals import hide_from_compiler

if TYPE_CHECKING:
    from bagua.engine.training_steps import TrainingSteps


def gradient_hook(steps: TrainingSteps, position: int) -> Callable[[Tensor], None]:
    """Calls what the steps have for the parameter at this position of the module: it stays when buckets change. The
    usual one sets a ready flag, so that this is the shortest way from a gradient to its communication."""
    reference = weakref.ref(steps)
    is_open = PassState.OPEN

    def hook(parameter: Tensor) -> None:
        steps = reference()
        if steps is not None and steps.engine.require_backward_grad_sync:
            on_gradient = steps.on_gradient[position]
            if on_gradient is None:
                steps.refuse_unsynchronized(position, parameter)
                return
            if steps.passes.state is not is_open:
                steps.open_pass()
            on_gradient(parameter)

    # Compiled code may run backward passes, in which hooks are called by Python as any other function.
    hide_from_compiler(hook)
    return hook


def foreign_step_hook(steps: TrainingSteps) -> Callable[[Optimizer], None]:
    """Before the step of any optimizer: those that the engine was not told of are looked at by their parameters."""
    reference = weakref.ref(steps)

    def hook(optimizer: Optimizer) -> None:
        steps = reference()
        if steps is not None:
            steps.on_foreign_step(optimizer)

    return hook


class EndOfPass:
    """Autograd's callback at the end of a backward pass. If that ends with an exception, autograd drops it uncalled."""

    _steps: TrainingSteps | None = None  # of one that torch.compile makes, without arguments, to look at it

    def __init__(self, steps: TrainingSteps, number: int) -> None:
        self._steps = steps
        self._number = number

    def __call__(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end_pass(self._number)

    def __del__(self) -> None:
        if self._steps is not None:
            self._steps.note_interruption(self._number)


hide_from_compiler(EndOfPass.__call__)
