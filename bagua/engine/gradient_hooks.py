"""What runs when autograd has made a parameter's gradient: on autograd's thread, once per parameter and pass.

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


def gradient_hook(passes: BackwardPasses, position: int) -> Callable[[Tensor], None]:
    """Calls what the passes have for the parameter at this position of the module: it stays when buckets change. The
    usual one sets a ready flag, so that this is the shortest way from a gradient to its communication."""
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
        if passes.state is is_open or passes.open_pass():
            on_gradient(parameter)

    # Compiled code may run backward passes, in which hooks are called by Python as any other function.
    hide_from_compiler(hook)
    return hook
