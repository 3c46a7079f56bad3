"""The graph of a gradient, which `backward(create_graph=True)` makes, ends where the gradient was communicated.

What other ranks have contributed has no graph here. To go on with this rank's part alone would be a derivative of
something else, and to drop the graph one that lacks a term: whoever differentiates the result is told.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Communicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _gradient: Tensor, result: Tensor, name: str) -> Tensor:
        ctx.name = name
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            f"The gradient of {ctx.name!r} has been communicated among the ranks. It cannot be differentiated.\n"
            "A backward pass reached .grad, which backward(create_graph=True) had made.\n"
            "Compute the gradient with torch.autograd.grad(loss, parameters, create_graph=True), which does not"
            " communicate. If you need the mean over all ranks, average the result with"
            " bagua.torch_api.data_parallel.functional.all_reduce(gradient, bagua.torch_api.ReduceOp.AVG)."
        )


@torch.enable_grad()
def without_graph(gradient: Tensor, result: Tensor, name: str) -> Tensor:
    """`result`, in the same memory, as what was communicated for `gradient`. It requires a gradient as that one does,
    and raises where one would flow back."""
    communicated: Tensor = _Communicated.apply(gradient, result.detach(), name)  # type: ignore[no-untyped-call]
    return communicated
