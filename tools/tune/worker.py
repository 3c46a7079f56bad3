"""One rank: `python -m tune.worker`, see rank_team.rank_process.

    -> {"op": "case", "model": "mlp", "allow": ["bytegrad"], "repetitions": 5, "pairs": 9, "cache": "/tmp/x"}
    <- {"event": "case", "tensor_bytes": [...], "turns": [[setting, turn], ...], "tuned": {...}, "pairs": {...}}

All settings have turns, in another order in each repetition; then the module tunes itself; then what it has chosen, the
best of all and the default are compared in turns.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rank_team.rank_process import join_bagua, run_rank

import bagua.torch_api  # noqa: F401 - gives modules `with_bagua`
from bagua.engine.plan_tuner import STEPS_PER_TURN, distinct_settings
from bagua.torch_api.algorithms import Algorithm
from bagua.tuning.setting import Bucket, Setting, Turn
from tune.models import Loss, build

_WARMUP = 10
_MOST_STEPS = 320


class _Training:
    def __init__(self, name: str, device: torch.device, **options: Any) -> None:
        module, self._loss = build(name, dist.get_rank(), device)
        self._device = device
        self.module: Any = module
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        self.module.with_bagua([self._optimizer], Algorithm.init("gradient_allreduce"), **options)
        self.engine = self.module.bagua_ddp
        self.steps = 0

    def step(self) -> float:
        begin = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        loss: Loss = self._loss
        loss(self.module, self.steps).backward()
        self._optimizer.step()
        self.steps += 1
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin

    def turn(self, algorithm: Any, setting: Setting) -> Turn:
        """As the tuner measures it."""
        present = self.engine.setup
        setup = dataclasses.replace(
            present,
            algorithm=algorithm,
            bucket_bytes=setting.bucket_bytes,
            first_bucket_bytes=setting.first_bucket_bytes,
        )
        if setup.communication != present.communication:
            self.engine.replan(setup)
        self.engine.recorder.begin_anew()
        self.step()
        seconds = [self.step() for _ in range(STEPS_PER_TURN)]
        stats = self.engine.stats()
        buckets = tuple(Bucket(one.nbytes, one.communication_s, one.launched_s) for one in stats.buckets)
        return Turn(min(seconds), stats.exposed_s, buckets)


def case(device: torch.device, command: Mapping[str, Any]) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = command["cache"]
    logging.getLogger("bagua").setLevel(logging.WARNING)
    training = _Training(command["model"], device)
    engine = training.engine
    engine.recorder.samples_all = True
    algorithms = {engine.setup.algorithm.label: engine.setup.algorithm}
    for name in command["allow"]:
        one = Algorithm.init(name)
        algorithms[one.label] = one
    setup = engine.setup
    default = Setting(setup.algorithm.label, setup.bucket_bytes, setup.first_bucket_bytes)
    tensor_bytes = [view.nbytes for bucket in engine.bagua_buckets for view in bucket.views]
    settings = distinct_settings(engine.bagua_buckets, default, list(algorithms))
    for _ in range(_WARMUP):
        training.step()
    order = random.Random(1)
    turns: list[tuple[Setting, Turn]] = []
    for _ in range(command["repetitions"]):
        order.shuffle(settings)  # by the same seed on all ranks
        turns += [(setting, training.turn(algorithms[setting.algorithm], setting)) for setting in settings]
    best = _same(min(settings, key=lambda one: statistics.median(turn.step_s for who, turn in turns if who == one)))
    tuned = _tune(command["model"], device, command["allow"])
    chosen = Setting.from_json(tuned["setting"])
    pairs: dict[str, list[float]] = {"default": [], "best": [], "chosen": []}
    compared = {"default": default, "best": best, "chosen": chosen}
    for _ in range(command["pairs"]):
        names = list(compared)
        order.shuffle(names)
        for name in names:
            setting = compared[name]
            pairs[name].append(training.turn(algorithms[setting.algorithm], setting).step_s)
    engine.detach()
    del training, engine
    gc.collect()
    return {
        "default": default.as_tuple(),
        "best": best.as_tuple(),
        "tensor_bytes": tensor_bytes,
        "turns": [[setting.as_tuple(), _finite(dataclasses.asdict(turn))] for setting, turn in turns],
        "tuned": tuned,
        "pairs": pairs,
    }


def _tune(model: str, device: torch.device, allow: Sequence[str]) -> dict[str, Any]:
    training = _Training(model, device, autotune=True, allow=allow)
    engine = training.engine
    seconds = []
    while engine.tuner is not None and training.steps < _MOST_STEPS:
        seconds.append(training.step())
    setting = Setting(engine.setup.algorithm.label, engine.setup.bucket_bytes, engine.setup.first_bucket_bytes)
    engine.detach()
    return {"setting": setting.as_tuple(), "steps": training.steps, "seconds": seconds}


def _same(value: Any) -> Any:
    """Rank 0's, on all ranks."""
    holder = [value]
    dist.broadcast_object_list(holder, 0)
    return holder[0]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    run_rank({"case": case}, join_bagua)
