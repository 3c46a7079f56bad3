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

from bagua.engine.tensor import record_of

if TYPE_CHECKING:
    from bagua.engine.training_steps import TrainingSteps


def marking_hook(steps: TrainingSteps, slot: int) -> Callable[[Tensor], None]:
    """Calls `steps.ready_flags[slot]`. The shortest way, for algorithms that only mark gradients as ready."""
    reference = weakref.ref(steps)

    def hook(_: Tensor) -> None:
        steps = reference()
        if steps is not None and steps.engine.require_backward_grad_sync:
            if not steps.pass_is_open:
                steps.open_pass()
            steps.ready_flags[slot]()

    return hook


def algorithm_hook(steps: TrainingSteps, name: str) -> Callable[[Tensor], None]:
    """Calls the algorithm's backward hook, and notes that the parameter was used."""
    reference = weakref.ref(steps)

    def hook(parameter: Tensor) -> None:
        steps = reference()
        if steps is not None and steps.engine.require_backward_grad_sync:
            if not steps.pass_is_open:
                steps.open_pass()
            steps.on_gradient(name, parameter)

    return hook


def refusing_hook(steps: TrainingSteps, name: str) -> Callable[[Tensor], None]:
    """Of a parameter that was frozen when buckets were made. If it gets a gradient, it was unfrozen where nobody looks:
    that would differ by rank."""
    reference = weakref.ref(steps)

    def hook(parameter: Tensor) -> None:
        steps = reference()
        if steps is None or not steps.engine.require_backward_grad_sync:
            return
        if record_of(parameter) is None:  # otherwise another module's engine synchronizes it
            module = steps.engine.bagua_module_name
            raise RuntimeError(
                f"{name!r} got a gradient, but is not synchronized.\n"
                f"It was frozen when {module} was wrapped or last called in training mode. Only a call of the module"
                " in train() mode notices that it was unfrozen.\n"
                "On all ranks, call the module once in train() mode (torch.no_grad() is enough), or wrap it again. To"
                " train this parameter on each rank separately, put its name into the module's"
                " _bagua_params_and_buffers_to_ignore."
            )

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

    def __init__(self, steps: TrainingSteps, number: int) -> None:
        self._steps: TrainingSteps | None = steps
        self._number = number

    def __call__(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.end_pass()

    def __del__(self) -> None:
        if self._steps is not None:
            self._steps.note_interruption(self._number)
