"""The experts of one rank. A module; its parameters are not synchronized.

Many experts that are alike are computed as one on a GPU, where launching kernels would take longer than running them:
with parameters stacked, by torch.func.vmap. Stacking copies all parameters, so that few experts are faster one by one,
and so are all on a CPU.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

# On an H100, with hidden sizes of 256 and 1024, stacking is 1.0 to 2.2 times as fast from here on, and with 2 to 4
# experts 0.75 to 1.1 times. On CPUs it is half as fast.
MIN_STACKED = 8

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_logger = logging.getLogger("bagua")


class Experts(nn.Module):
    """
    Args:
        expert: is copied for each.
        count: of this rank's experts.
    """

    def __init__(self, expert: nn.Module, count: int) -> None:
        super().__init__()
        self.bagua_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(count)])
        self._may_stack = True
        self._mark()

    def forward(self, tokens: Tensor) -> Tensor:
        """[experts, tokens, hidden] -> the same shape: row i by expert i."""
        experts = list(self.bagua_experts)
        if self._may_stack and pays(tokens.device, len(experts)) and are_alike(experts):
            try:
                return stacked(experts, tokens)
            except RuntimeError as error:  # vmap's, of what it cannot do; others come again below
                self._may_stack = False
                _logger.info(f"experts of MoE are computed one by one: {error}")
        return torch.stack([_only(expert(one)) for expert, one in zip(experts, tokens, strict=True)])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()  # copies of parameters lose their attributes

    def _mark(self) -> None:
        for parameter in self.parameters():
            parameter.expert = True  # type: ignore[attr-defined]


def pays(device: torch.device, count: int) -> bool:
    """Whether it is faster to compute so many experts together."""
    return device.type == "cuda" and count >= MIN_STACKED


def are_alike(experts: list[nn.Module]) -> bool:
    """Whether the first one's code, with the parameters of another, is the other: the same layers with the same
    settings and parameters, and neither buffers nor hooks."""
    first = _description(experts[0])
    return first is not None and all(_description(one) == first for one in experts[1:])


def stacked(experts: list[nn.Module], tokens: Tensor) -> Tensor:
    """As `Experts.forward`, in one computation.

    Raises:
        RuntimeError: torch.func.vmap cannot do what the experts do.
    """
    parameters = [dict(one.named_parameters()) for one in experts]
    together = {name: torch.stack([one[name] for one in parameters]) for name in parameters[0]}

    def one_expert(state: dict[str, Tensor], rows: Tensor) -> Tensor:
        return _only(torch.func.functional_call(experts[0], state, (rows,)))

    result: Tensor = torch.func.vmap(one_expert, randomness="different")(together, tokens)
    return result


def _description(expert: nn.Module) -> list[object] | None:
    """None if it has buffers or hooks."""
    found: list[object] = []
    for name, layer in expert.named_modules():
        if layer._buffers or any(getattr(layer, hooks) for hooks in _HOOKS):
            return None
        plain = {key: value for key, value in vars(layer).items() if isinstance(value, bool | int | float | str)}
        found.append((name, type(layer), plain))
    found += [(name, one.shape, one.dtype, one.requires_grad) for name, one in expert.named_parameters()]
    return found


def _only(output: Any) -> Tensor:
    """The first, where an expert returns several values."""
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result
