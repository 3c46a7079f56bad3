"""What a rank does for `measure memory`: see measure.rank. All measurements are made in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bagua.torch_api.algorithms import Algorithm
from measure.memory.tool import ADAM, ALGORITHMS, PLAIN, QADAM, QADAM_WARMUP_STEPS
from measure.memory_probe import Probe
from measure.rank import join_bagua

# Until gradients, states and buffers exist, and QAdam compresses.
SETTLING_STEPS = QADAM_WARMUP_STEPS + 3


def prepare(_: torch.device) -> None:
    join_bagua()


def _build(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """Much of it is parameters, and next to nothing activations: batches have one sample."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(layers)))


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    # One parameter after the other: an optimizer's temporary copies of all would hide what is to be measured.
    if kind == ADAM:
        return torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    if kind == QADAM:
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        optimizer: torch.optim.Optimizer = QAdamOptimizer(model.parameters(), lr=1e-4, warmup_steps=QADAM_WARMUP_STEPS)
        return optimizer
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=False)


def _wrap(name: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    chosen = ALGORITHMS[name]
    options = dict(chosen.options)
    if chosen.algorithm == "qadam":
        options["q_adam_optimizer"] = optimizer
    model.with_bagua([optimizer], Algorithm.init(chosen.algorithm, **options))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, sample: torch.Tensor, set_to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    model(sample).square().mean().backward()
    optimizer.step()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, **fields: Any) -> dict[str, Any]:
    """With gradients that stay where they are, and with fresh ones in each step. What this process does once is in no
    figure: its first measurement is repeated."""
    for _ in range(1 if _is_warm else 2):
        in_place, fresh = (_measure(device, set_to_none=set_to_none, **fields) for set_to_none in (False, True))
    _is_warm.append(True)
    return {**in_place, "fresh_peak": fresh["peak"]}


_is_warm: list[bool] = []


def _measure(
    device: torch.device, variant: str, optimizer: str, layers: int, width: int, steps: int, set_to_none: bool, **_: Any
) -> dict[str, Any]:
    """
    Args:
        optimizer: Of plain training.
        set_to_none: zero_grad's.
    """
    algorithm = None if variant == PLAIN else variant
    probe = Probe(device)
    sample = torch.ones(1, width, device=device)
    probe.begin()
    model: Any = _build(layers, width, device)
    stepping = _optimizer(optimizer if algorithm is None else ALGORITHMS[algorithm].optimizer, model)
    if algorithm is not None:
        _wrap(algorithm, model, stepping)
    try:
        for _ in range(SETTLING_STEPS):
            _step(model, stepping, sample, set_to_none)
        _wait(device)
        probe.restart()
        for _ in range(steps):
            _step(model, stepping, sample, set_to_none)
        _wait(device)
        use = probe.use()
        if algorithm is not None and ALGORITHMS[algorithm].algorithm == "async":
            model.bagua_algorithm.abort(model)
        buckets = [] if algorithm is None else [bucket.flattened_tensor().numel() for bucket in model.bagua_buckets]
    finally:
        if algorithm is not None:
            model.bagua_ddp.detach()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "kept": use.kept, "peak": use.peak, "largest_bucket": max(buckets, default=0)}
