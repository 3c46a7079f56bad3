"""Copies of a rank's own gradients, as they were before they were communicated: with them, a pass is repeated among
other ranks (bagua.regroup).

Owned by the module's PlanMaker. Filled where buckets are launched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LocalGradients:
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._copies = {id(one): torch.empty_like(one, requires_grad=False) for one in parameters}
        self._made: set[int] = set()  # ids of parameters that have a gradient in this pass

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self._copies.values())

    def begin_pass(self) -> None:
        """There are none yet."""
        self._made.clear()

    def keep(self, parameters: Sequence[Tensor]) -> None:
        """Their gradients as they are now, on the current stream. Those that do not exist count as zeros later on."""
        copies, gradients = [], []
        for one in parameters:
            gradient = one.grad
            if gradient is not None:
                self._made.add(id(one))
                copies.append(self._copies[id(one)])
                gradients.append(gradient)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, gradients)

    def put_back(self, parameter: Tensor) -> bool:
        """Its gradient is what it was.

        Returns:
            whether it had one in this pass.
        """
        has_one = id(parameter) in self._made
        # Not the copy itself: results are written to what is no view of a bucket.
        parameter.grad = self._copies[id(parameter)].clone() if has_one else None
        return has_one
