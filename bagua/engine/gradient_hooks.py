"""What runs when autograd has made a parameter's gradient: on autograd's thread, once per parameter and pass.

The hooks refer to the engine weakly. A tensor's hooks are held by C++ where Python's collector does not look: through a
strong reference the engine, and with it the module that it trains, would never be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from bagua.engine.data_parallel import BaguaDistributedDataParallel


def marking_hook(engine: BaguaDistributedDataParallel, slot: int) -> Callable[[Tensor], None]:
    """Calls `engine.marks[slot]`. The shortest way, for algorithms that only mark gradients as ready."""
    reference = weakref.ref(engine)

    def hook(_: Tensor) -> None:
        engine = reference()
        if engine is not None and engine.require_backward_grad_sync:
            if not engine.pass_is_open:
                engine.open_pass()
            engine.marks[slot]()

    return hook


def algorithm_hook(engine: BaguaDistributedDataParallel, name: str) -> Callable[[Tensor], None]:
    """Calls the algorithm's backward hook, and notes that the parameter was used."""
    reference = weakref.ref(engine)

    def hook(parameter: Tensor) -> None:
        engine = reference()
        if engine is not None and engine.require_backward_grad_sync:
            if not engine.pass_is_open:
                engine.open_pass()
            engine.on_gradient(name, parameter)

    return hook
