"""A task: data that packages ship, a model, and what its outputs are worth. Deterministic: every rank builds the same.

The builders are in digits.py, photographs.py and text.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Split:
    """Inputs and targets, the first dimension of both is the sample."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))

    def take(self, indices: Tensor) -> Split:
        return Split(self.inputs[indices], self.targets[indices])


@dataclass(frozen=True)
class Task:
    """
    build_model: of torch's global random state.
    classifies: targets are classes, losses are cross-entropies in nats, and accuracy means something. Otherwise losses
        are mean squared errors.
    source: where the data comes from, with what tells versions of it apart.
    evaluated_train: the training samples that the reported training loss is of; None: all.
    penalty: times half the sum of squares of all parameters is added to the loss that is trained with, not to those
        that are reported. It is part of the loss because optimizers differ in what they make of weight decay.
    """

    name: str
    train: Split
    test: Split
    build_model: Callable[[], nn.Module]
    classifies: bool
    source: str
    evaluated_train: Split | None = None
    penalty: float = 0.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over all targets: classes [...] for outputs [..., classes], or values of the outputs' shape."""
        if self.classifies:
            return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())
        return functional.mse_loss(outputs, targets)

    def training_loss(self, model: nn.Module, batch: Split) -> Tensor:
        loss = self.loss(model(batch.inputs), batch.targets)
        if self.penalty:
            squares = torch.stack([parameter.square().sum() for parameter in model.parameters()])
            loss = loss + self.penalty / 2 * squares.sum()
        return loss

    def right(self, outputs: Tensor, targets: Tensor) -> int:
        """How many targets the outputs predict; 0 where they are no classes."""
        return int((outputs.argmax(dim=-1) == targets).sum()) if self.classifies else 0


def build_task(name: str) -> Task:
    """
    Raises:
        ValueError: no such task.
        RuntimeError: a package that brings the data is missing.
    """
    from measure.convergence.catalogue import TASKS

    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; choose of {', '.join(TASKS)}")
    module, builder = TASKS[name].builder.split(":")
    task = getattr(importlib.import_module(f"measure.convergence.{module}"), builder)()
    assert isinstance(task, Task)
    return task


def dataset_of_sklearn(loader: str) -> tuple[Any, str]:
    """What sklearn.datasets.LOADER() gives, and its source; nothing is downloaded."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise RuntimeError(
            "this task's data comes with scikit-learn, which is not installed; run: pip install scikit-learn"
        ) from error
    return getattr(datasets, loader)(), f"scikit-learn {importlib.import_module('sklearn').__version__}"
