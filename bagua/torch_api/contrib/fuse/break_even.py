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
    """

    calls: int
    elements: int

    def is_small(self, parameter: Tensor) -> bool:
        """Whether a run gains from it."""
        return parameter.numel() < self.elements

    def pays(self, parameters: Iterable[Tensor]) -> bool:
        """Whether these take less time as a run."""
        saved = [1 - one.numel() / self.elements for one in parameters]
        return len(saved) > 1 and sum(saved) >= self.calls


# By device type, implementation, and what is computed: SGD without and with momentum, and optimizers with more states.
# Measured with new gradients in each step, on one core of a CPU and on an H100 (compare_optimizer_steps.py).
_MEASURED = {
    ("cpu", "for-loop"): {"sgd": (12, 6144), "momentum": (4, 16384), "states": (4, 24576)},
    ("cpu", "foreach"): {"sgd": (28, 3072), "momentum": (8, 12288), "states": (6, 32768)},
    ("cpu", "fused"): {"sgd": (96, 2048), "momentum": (32, 4096), "states": (14, 12288)},
    ("cuda", "for-loop"): {"sgd": (8, 65536), "momentum": (5, 65536), "states": (4, 65536)},
    ("cuda", "foreach"): {"sgd": (128, 16384), "momentum": (48, 32768), "states": (16, 32768)},
    ("cuda", "fused"): {"sgd": (128, 16384), "momentum": (64, 16384), "states": (64, 16384)},
}

# Groups with fewer elements in all are toys: they are always fused, as by Bagua 0.9, whatever it costs.
_TOY_ELEMENTS = 128


def break_even(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> BreakEven:
    """
    Args:
        group: of the optimizer. Its options choose the implementation.
    """
    if sum(map(Tensor.numel, group["params"])) < _TOY_ELEMENTS:
        return BreakEven(0, _TOY_ELEMENTS)
    device = next((one.device.type for one in group["params"]), "cpu")
    if group.get("fused"):
        implementation = "fused"
    elif group.get("foreach") or (group.get("foreach", False) is None and device != "cpu"):
        implementation = "foreach"
    else:
        implementation = "for-loop"
    if not isinstance(optimizer, torch.optim.SGD):
        kind = "states"
    else:
        kind = "momentum" if group.get("momentum") else "sgd"
    return BreakEven(*_MEASURED["cpu" if device == "cpu" else "cuda", implementation][kind])
