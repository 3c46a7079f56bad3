"""Whether parameters take less time to step as one flat tensor than one by one. Pure functions; any thread.

A run of small parameters saves the calls for each of them, and costs a fixed time and a copy of new gradients. So a
parameter of n elements counts as 1 - n / `elements` of a call, and a run pays if it saves at least `calls`. Larger
parameters are left where they are, and stepped as without fusing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class BreakEven(NamedTuple):
    """
    Attributes:
        calls: what a run must save.
        elements: of a parameter whose copy takes as long as what it saves.
        run_elements: longer runs are cut. On CPUs, what a step computes in between would not be in a cache any more.
    """

    calls: int
    elements: int
    run_elements: int

    def is_small(self, parameter: Tensor) -> bool:
        """Whether a run gains from it."""
        return parameter.numel() < self.elements

    def pays(self, parameters: Iterable[Tensor]) -> bool:
        """Whether these take less time as a run."""
        saved = [1 - one.numel() / self.elements for one in parameters]
        return len(saved) > 1 and sum(saved) >= self.calls


# By device type, implementation, and what is computed: SGD without and with momentum, and optimizers with more states.
# Measured with new gradients in each step, on one core of a CPU and on an H100 (`measure optimizers`).
_MEASURED = {
    ("cpu", "for-loop"): {"sgd": (12, 4096), "momentum": (4, 12288), "states": (4, 16384)},
    ("cpu", "foreach"): {"sgd": (32, 2048), "momentum": (8, 8192), "states": (6, 16384)},
    ("cpu", "fused"): {"sgd": (96, 1024), "momentum": (32, 2048), "states": (14, 8192)},
    ("cuda", "for-loop"): {"sgd": (8, 65536), "momentum": (5, 65536), "states": (4, 65536)},
    ("cuda", "foreach"): {"sgd": (64, 131072), "momentum": (32, 131072), "states": (12, 131072)},
    ("cuda", "fused"): {"sgd": (80, 131072), "momentum": (40, 131072), "states": (48, 131072)},
}
_RUN_ELEMENTS = {("cpu", "for-loop"): 1 << 17, ("cpu", "foreach"): 1 << 20, ("cpu", "fused"): 1 << 20}
_ANY = 1 << 62

# Toys are always fused, as by Bagua 0.9, though it takes some microseconds longer: fewer elements in a group than the
# first, in no more parameters than the second.
_TOY = 1024, 8


def break_even(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> BreakEven:
    """
    Args:
        group: of the optimizer. Its options choose the implementation.
    """
    elements, parameters = sum(map(Tensor.numel, group["params"])), len(group["params"])
    if elements < _TOY[0] and parameters <= _TOY[1] and not group.get("fused"):
        return BreakEven(0, _TOY[0], _ANY)
    device = next((one.device.type for one in group["params"]), "cpu")
    if group.get("fused"):
        implementation = "fused"
    elif group.get("foreach") or (group.get("foreach", False) is None and device != "cpu"):
        implementation = "foreach"
    else:
        implementation = "for-loop"
    kind = "states"
    if isinstance(optimizer, torch.optim.SGD):
        kind = "momentum" if group.get("momentum") else "sgd"
    case = "cpu" if device == "cpu" else "cuda", implementation
    return BreakEven(*_MEASURED[case][kind], _RUN_ELEMENTS.get(case, _ANY))
