"""One rank: `python -m measure.memory.worker`, see measure.ranks.rank_process. All measurements are made in it.

    -> {"op": "measure", "case": "bytegrad", "optimizer": "sgd", "layers": 24, "width": 1024, "steps": 6,
        "set_to_none": false}
    <- {"event": "measure", "parameters": 25190400, "kept": ..., "peak": ..., "buckets": [elements, ...]}
case null: plain training, without Bagua. set_to_none: zero_grad's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from bagua.torch_api.algorithms import Algorithm
from measure.memory.catalogue import ADAM, CASES, QADAM, QADAM_WARMUP_STEPS
from measure.memory_probe import Probe
from measure.ranks.rank_process import run_rank

# Until gradients, states and buffers exist, and QAdam compresses.
SETTLING_STEPS = QADAM_WARMUP_STEPS + 3


def build(layers: int, width: int, device: torch.device) -> nn.Sequential:
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


def _wrap(case: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    chosen = CASES[case]
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


def _measure(device: torch.device, command: Mapping[str, Any]) -> dict[str, Any]:
    probe = Probe(device)
    sample = torch.ones(1, command["width"], device=device)
    probe.begin()
    model: Any = build(command["layers"], command["width"], device)
    optimizer = _optimizer(command["optimizer"], model)
    case = command["case"]
    if case is not None:
        _wrap(case, model, optimizer)
    try:
        for _ in range(SETTLING_STEPS):
            _step(model, optimizer, sample, command["set_to_none"])
        _wait(device)
        probe.restart()
        for _ in range(command["steps"]):
            _step(model, optimizer, sample, command["set_to_none"])
        _wait(device)
        use = probe.use()
        if case is not None and CASES[case].algorithm == "async":
            model.bagua_algorithm.abort(model)
        buckets = [] if case is None else [bucket.flattened_tensor().numel() for bucket in model.bagua_buckets]
    finally:
        if case is not None:
            model.bagua_ddp.detach()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "kept": use.kept, "peak": use.peak, "buckets": buckets}


if __name__ == "__main__":
    run_rank({"measure": _measure})
