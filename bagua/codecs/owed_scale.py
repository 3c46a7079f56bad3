"""The scale of a loss, for what one step owes to the next: it is worth something else once a GradScaler changes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OwedScale:
    """
    Of one tensor that is owed. Used by those who use that.

    Args:
        scaler: the torch.amp.GradScaler that scales the loss; None: nobody has said.

    Attributes:
        value: in what scale the tensor is, fp32 of no dimensions; None: unknown.
    """

    def __init__(self, scaler: Any = None) -> None:
        self._scaler = scaler
        self.value: Tensor | None = None

    def update(self, device: torch.device) -> Tensor | None:
        """A step begins. Nothing waits for the device.

        Returns:
            what the tensor is to be multiplied by; None: it stays.
        """
        if self._scaler is None:
            return None
        before, self.value = self.value, self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))
        return None if before is None else self.value / before.to(device)
