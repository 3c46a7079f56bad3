"""Backends that take turns, and the rounds that they make."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bagua.net.bench.verdict import PairedRatio, paired_ratio
from bagua.torch_api.contrib import fuse_optimizer

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, **options),
    "momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-3, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-3, **options),
}
# What fuse_step is compared with, and the options of both.
_THEIRS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused=True": {"fused": True},
}
OURS = {"fuse_step" if one == "for-loop" else f"fuse_step of {one}": one for one in _THEIRS}
BACKENDS = {**_THEIRS, **{ours: _THEIRS[theirs] for ours, theirs in OURS.items()}}
COMPILED = "compiled"


@dataclass(frozen=True)
class Row:
    """The rounds of one backend, with those of the for-loop and of foreach, and of what fuse_step replaces."""

    optimizer: str
    gradients: str
    parameters: int
    elements: int
    backend: str
    ms: tuple[float, ...]
    over_loop: PairedRatio
    over_foreach: PairedRatio
    over_replaced: PairedRatio | None


class Case:
    """One backend: its parameters, with gradients, and its optimizer."""

    def __init__(self, backend: str, optimizer: str, count: int, elements: int, device: str) -> None:
        self.device = torch.device(device)
        self.parameters = [torch.nn.Parameter(torch.ones(elements, device=self.device)) for _ in range(count)]
        made = OPTIMIZERS[optimizer](self.parameters, **BACKENDS.get(backend, {"foreach": True}))
        self.step = fuse_optimizer(made).fuse_step if backend in OURS else made.step
        if backend == COMPILED:
            self.step = torch.compile(made.step)
        self.give_gradients()

    def give_gradients(self) -> None:
        for one in self.parameters:
            one.grad = torch.full_like(one, 1e-3)

    def turn(self, steps: int, *, fresh: bool) -> float:
        """Milliseconds a step."""
        taken = 0.0
        for _ in range(steps):
            if fresh:
                self.give_gradients()
            self._wait()
            begin = time.perf_counter()
            self.step()
            self._wait()
            taken += time.perf_counter() - begin
        return taken / steps * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compare(optimizer: str, gradients: str, count: int, elements: int, given: argparse.Namespace) -> list[Row]:
    backends = [*BACKENDS, *([COMPILED] if count <= given.compile_up_to else [])]
    cases = {backend: Case(backend, optimizer, count, elements, given.device) for backend in backends}
    steps = max(1, given.steps * 256 // (count * max(256, elements)))
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    order = random.Random(count)
    for number in range(given.rounds + 1):
        for backend in order.sample(backends, len(backends)):
            # The first round is the warm-up: states are made, kernels compiled, kept gradients taken over.
            taken = cases[backend].turn(steps if number else 3, fresh=gradients == "fresh")
            if number:
                times[backend].append(taken)
    loop, foreach = times["for-loop"], times["foreach"]
    return [
        Row(
            *(optimizer, gradients, count, elements, one, tuple(ms)),
            *(paired_ratio(loop, ms), paired_ratio(foreach, ms)),
            paired_ratio(times[OURS[one]], ms) if one in OURS else None,
        )
        for one, ms in times.items()
    ]
