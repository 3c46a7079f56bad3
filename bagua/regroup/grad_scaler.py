"""Lets a GradScaler do nothing in a step that is dropped: it finds no gradients then, and would raise. What it has
found of the gradients before is forgotten, and its scale stays, as on the other ranks.

Installed by `Regrouping` on torch's class, as long as it is at work: subclasses call these methods, too.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.amp import grad_scaler


class Steps(Protocol):
    """Of this process: bagua.regroup.coordinator.Regrouping."""

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is an optimizer of a wrapped model."""

    def drops(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its step is dropped."""

    def refuse_scaler_without_state(self, scaler: object) -> None:
        """ValueError: ranks do not take this scaler's state from each other."""

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step."""

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped, or does not in this step."""


_regrouping: Steps | None = None
_DROPPED = "_bagua_has_dropped"


def install(regrouping: Steps) -> Callable[[], None]:
    """
    Returns:
        what takes it back.
    """
    global _regrouping
    _regrouping = regrouping
    kind: Any = grad_scaler.GradScaler
    originals = {name: getattr(kind, name) for name in ("unscale_", "step", "update")}
    for name, around in (("unscale_", _unscale), ("step", _step), ("update", _update)):
        setattr(kind, name, functools.partialmethod(around, originals[name]))

    def take_back() -> None:
        global _regrouping
        _regrouping = None
        for name, original in originals.items():
            setattr(kind, name, original)

    return take_back


def _concerned(scaler: Any, optimizer: torch.optim.Optimizer) -> Steps | None:
    regrouping = _regrouping
    if regrouping is None or not scaler.is_enabled() or not regrouping.concerns(optimizer):
        return None
    regrouping.refuse_scaler_without_state(scaler)
    return regrouping


def _unscale(scaler: Any, original: Any, optimizer: torch.optim.Optimizer) -> None:
    regrouping = _concerned(scaler, optimizer)
    if regrouping is None or not regrouping.drops(optimizer):
        original(scaler, optimizer)


def _step(scaler: Any, original: Any, optimizer: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
    regrouping = _concerned(scaler, optimizer)
    if regrouping is None:
        return original(scaler, optimizer, *arguments, **named)
    result = None
    regrouping.begin_step(optimizer)
    if not regrouping.drops(optimizer):
        result = original(scaler, optimizer, *arguments, **named)
    regrouping.end_step(optimizer)  # of one that it did not make, because of infinities or a loss
    setattr(scaler, _DROPPED, regrouping.drops(optimizer))
    return result


def _update(scaler: Any, original: Any, *arguments: Any, **named: Any) -> None:
    if getattr(scaler, _DROPPED, False):
        setattr(scaler, _DROPPED, False)
        scaler._per_optimizer_states = defaultdict(grad_scaler._refresh_per_optimizer_state)
        return
    original(scaler, *arguments, **named)
