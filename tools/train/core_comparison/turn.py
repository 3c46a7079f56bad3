"""A contender's turn on one rank: a fresh model is built, wrapped, trained for some steps and freed.

Every contender finds the same memory: what the one before it held has been given back to the driver.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from core_comparison.contenders import wrap
from core_comparison.models import Workload
from core_comparison.step_clock import StepClock

# The trace is searched for this name.
BACKWARD = "core_comparison:backward"
# A contender may keep a flag or a counter; this much would change no figure of the table.
_MIB = 1 << 20
_KEPT_LIMIT_BYTES = _MIB


@dataclass(frozen=True)
class Measured:
    """What one rank saw of its turn. Memory is torch's own, in bytes; None on a CPU."""

    step_seconds: list[float]
    last_loss: float
    parameters: int  # elements
    gradients: int  # tensors
    peak_bytes: int | None  # of the whole turn, the making of the model with it
    steps_peak_bytes: int | None  # of the measured steps


class Turn:
    """Use as `with Turn(...) as turn:`, at whose end the model is gone; what is left of it then says `kept`."""

    def __init__(self, contender: str, device: torch.device) -> None:
        self._contender = contender
        self._device = device
        self._workload: Workload | None = None
        self._forward: nn.Module | None = None
        self._watch: weakref.ref[nn.Module] | None = None
        self._bytes_before = 0
        self._steps = 0

    def __enter__(self) -> Turn:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            self._bytes_before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._workload = self._forward = None
        # Wrappers hook themselves into the model, and so are cycles.
        gc.collect()
        if self._device.type == "cuda":
            # cuBLAS's workspaces, one for each thread and stream that multiplied, live in torch's memory: the next
            # contender would find those of this one.
            clear: Any = torch._C
            clear._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wrap(self, workload: Workload) -> None:
        self._workload = workload
        self._watch = weakref.ref(workload.model)
        self._forward = wrap(self._contender, workload.model, workload.optimizer, self._device)

    @property
    def model(self) -> nn.Module:
        assert self._workload is not None
        return self._workload.model

    def train(self, steps: int) -> torch.Tensor:
        """The loss of the last of them, not waited for."""
        assert steps >= 1
        loss = torch.empty(0)
        for _ in range(steps):
            loss = self._step()
        return loss

    def measure(self, steps: int, warmup: int) -> Measured:
        clock = StepClock(self._device)
        if warmup:
            self.train(warmup)
        build_peak = self._peak()
        # No waiting here: the first step shall find the queue of kernels as full as the others do. The count of
        # allocated bytes is the host's and needs none.
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        loss = torch.empty(0)
        clock.mark()
        for _ in range(steps):
            loss = self._step()
            clock.mark()
        seconds = clock.seconds()
        steps_peak = self._peak()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return Measured(
            step_seconds=seconds,
            last_loss=float(loss),
            parameters=sum(parameter.numel() for parameter in parameters),
            gradients=len(parameters),
            peak_bytes=None if build_peak is None or steps_peak is None else max(build_peak, steps_peak),
            steps_peak_bytes=steps_peak,
        )

    def kept(self) -> str | None:
        """After the `with`: what was not freed and is charged to the next contender; None if all was."""
        if self._watch is not None and self._watch() is not None:
            return "its model is still referenced by something"
        if self._device.type != "cuda":
            return None
        kept_bytes = torch.cuda.memory_allocated(self._device) - self._bytes_before
        if kept_bytes <= _KEPT_LIMIT_BYTES:
            return None
        return f"{kept_bytes / _MIB:.0f} MiB of GPU memory are still allocated"

    def _step(self) -> torch.Tensor:
        assert self._workload is not None
        assert self._forward is not None
        workload = self._workload
        workload.optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(self._forward, self._steps)
        with record_function(BACKWARD):
            loss.backward()
        workload.optimizer.step()
        self._steps += 1
        return loss.detach()

    def _peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
