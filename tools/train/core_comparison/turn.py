"""A contender's turn on one rank: a fresh model is built, wrapped, trained for some steps and freed.

Every contender finds the same memory: what the one before it held has been given back to the driver.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from core_comparison.contenders import Training, wrap
from core_comparison.models import Workload
from core_comparison.processor_time import ProcessorClock
from core_comparison.step_clock import StepClock
from core_comparison.turn_memory import TurnMemory

# The trace is searched for this name.
BACKWARD = "core_comparison:backward"


@dataclass(frozen=True)
class Measured:
    """What one rank saw of its turn. Memory in bytes, see TurnMemory; None where it cannot be told."""

    step_seconds: list[float]
    last_loss: float
    parameters: int  # elements
    gradients: int  # tensors
    peak_bytes: int | None  # of the whole turn, the making of the model with it
    steps_peak_bytes: int | None  # of the measured steps
    own_cores: float  # see ProcessorShare; of the measured steps
    machine_busy: float | None
    averagings: int | None  # in the measured steps; None: one in each


class Turn:
    """Use as `with Turn(...) as turn:`, at whose end the model is gone; what is left of it then says `kept`."""

    def __init__(self, contender: str, device: torch.device) -> None:
        self._contender = contender
        self._device = device
        self._workload: Workload | None = None
        self._training: Training | None = None
        self._watch: weakref.ref[nn.Module] | None = None
        self._memory = TurnMemory(device)
        self._steps = 0
        self._is_finished = False

    def __enter__(self) -> Turn:
        self._memory.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Ranks end together what communicates by itself; after an error the others may not come.
        if kind is None:
            self.finish()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._workload = self._training = None
        # Wrappers hook themselves into the model, and so are cycles.
        gc.collect()
        if self._device.type == "cuda":
            # cuBLAS's workspaces, one for each thread and stream that multiplied, live in torch's memory: the next
            # contender would find those of this one.
            clear: Any = torch._C
            clear._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wrap(self, workload: Workload, *, warmup: int) -> None:
        self._workload = workload
        self._watch = weakref.ref(workload.model)
        self._training = wrap(self._contender, workload.model, workload.optimizer, self._device, warmup=warmup)

    def finish(self) -> None:
        """No communication after this; parameters may be looked at. A second call does nothing."""
        if self._training is not None and not self._is_finished:
            self._training.finish()
        self._is_finished = True

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
        build_peak = self._memory.peak()
        # No waiting here: the first step shall find the queue of kernels as full as the others do. The count of
        # allocated bytes is the host's and needs none.
        self._memory.restart()
        loss = torch.empty(0)
        assert self._training is not None
        count = self._training.averagings
        averagings_before = 0 if count is None else count()
        processors = ProcessorClock()
        clock.mark()
        for _ in range(steps):
            loss = self._step()
            clock.mark()
        seconds = clock.seconds()
        share = processors.share()
        steps_peak = self._memory.peak()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return Measured(
            step_seconds=seconds,
            last_loss=float(loss),
            parameters=sum(parameter.numel() for parameter in parameters),
            gradients=len(parameters),
            peak_bytes=None if build_peak is None or steps_peak is None else max(build_peak, steps_peak),
            steps_peak_bytes=steps_peak,
            own_cores=share.own_cores,
            machine_busy=share.machine_busy,
            averagings=None if count is None else count() - averagings_before,
        )

    def kept(self) -> str | None:
        """After the `with`: what was not freed and is charged to the next contender; None if all was."""
        if self._watch is not None and self._watch() is not None:
            return "its model is still referenced by something"
        return self._memory.kept()

    def _step(self) -> torch.Tensor:
        assert self._workload is not None
        assert self._training is not None
        optimizer = self._training.optimizer
        optimizer.zero_grad(set_to_none=True)
        loss = self._workload.loss(self._training.forward, self._steps)
        with record_function(BACKWARD):
            loss.backward()
        optimizer.step()
        self._steps += 1
        return loss.detach()
