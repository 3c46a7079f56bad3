"""What runs when autograd has made a parameter's gradient: on autograd's thread, once per parameter and pass. And what
runs when the pass ends.

The hooks refer to the passes weakly. A tensor's hooks are held by C++ where Python's collector does not look: through a
strong reference they, and with them the engine and the module that it trains, would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from bagua.engine.backward_passes import BackwardPasses
from bagua.engine.step_state import PassState
from bagua.job.torch_internals import hide_from_compiler


def gradient_hook(
    passes: BackwardPasses, position: int, open_pass: weakref.WeakMethod[Callable[[], None]]
) -> Callable[[Tensor], None]:
    """Calls what the passes have for the parameter at this position of the module: it stays when buckets change. The
    usual one sets a ready flag, so that this is the shortest way from a gradient to its communication.

    Args:
        passes: of the module.
        position: of the parameter in the module.
        open_pass: called with the first gradient of a pass.
    """
    reference = weakref.ref(passes)
    is_open = PassState.OPEN

    def hook(parameter: Tensor) -> None:
        passes = reference()
        if passes is None:
            return
        if not passes.communicates:
            if passes.weights is not None:
                passes.weights.note_gradient()
            return
        on_gradient = passes.on_gradient[position]
        if on_gradient is None:
            passes.refuse_unsynchronized(position, parameter)
            return
        if passes.state is not is_open:
            begin = open_pass()
            if begin is not None:
                begin()
        on_gradient(parameter)

    # Compiled code may run backward passes, in which hooks are called by Python as any other function.
    hide_from_compiler(hook)
    return hook


class EndOfPass:
    """Autograd's callback at the end of a backward pass. If that ends with an exception, autograd drops it uncalled.

    Args:
        number: of the pass, which both functions are given.
        on_end: called at the end.
        on_exception: called instead, if the pass has ended with an exception.
    """

    _on_exception: Callable[[int], None] | None = None  # of one that torch.compile makes, without arguments

    def __init__(self, number: int, on_end: Callable[[int], None], on_exception: Callable[[int], None]) -> None:
        self._number = number
        self._on_end = on_end
        self._on_exception = on_exception

    def __call__(self) -> None:
        if self._on_exception is not None:
            self._on_exception = None
            self._on_end(self._number)

    def __del__(self) -> None:
        if self._on_exception is not None:
            self._on_exception(self._number)


hide_from_compiler(EndOfPass.__call__)
