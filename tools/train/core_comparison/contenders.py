"""How a model is made data-parallel: torch's DDP, `with_bagua`, and Bagua's DistributedDataParallel.

Bagua is imported only for its own contenders: torch's DDP is measured in a process that it has not touched, if it is
compared with nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core_comparison.catalogue import BASELINE, CONTENDERS


def wrap(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> nn.Module:
    """The module whose forward and backward the contender trains with.

    Raises:
        ValueError: unknown name.
    """
    if name == BASELINE:
        # torch's defaults but for the gradients, which are views of the buckets: else it copies each one twice.
        devices = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    # Any: what Bagua adds to every module is seen by no type checker, and it may be absent.
    algorithms: Any = importlib.import_module("bagua.torch_api.algorithms.gradient_allreduce")
    algorithm = algorithms.GradientAllReduceAlgorithm()
    wrapped: Any = model
    if name == "with-bagua":
        wrapped = wrapped.with_bagua([optimizer], algorithm)
    elif name == "bagua-ddp":
        package: Any = importlib.import_module("bagua.torch_api.data_parallel")
        wrapped = package.DistributedDataParallel(model, optimizers=[optimizer], algorithm=algorithm)
    else:
        raise ValueError(f"unknown contender {name!r}; choose of {', '.join(CONTENDERS)}")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def prepare(names: Sequence[str]) -> None:
    """Once per process, when torch's default group exists, which Bagua then shares.

    Raises:
        RuntimeError: a contender needs Bagua's training core, which this installation lacks.
    """
    needing = [name for name in names if name != BASELINE]
    if not needing:
        return
    try:
        bagua: Any = importlib.import_module("bagua.torch_api")
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"contender {needing[0]} needs bagua.torch_api, which cannot be imported ({error}); install the package"
            f" that has it, or compare with --contenders {BASELINE} alone"
        ) from error
    bagua.init_process_group()
