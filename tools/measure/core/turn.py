"""An algorithm's turn on one rank: a fresh model is built, wrapped, trained for some steps and freed.

Every algorithm finds the same memory: what the one before it held has been given back to the driver.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from measure.core.averaging_cycles import AveragingCycles, largest_of_ranks
from measure.core.cpu_time import CpuClock
from measure.core.models import Workload
from measure.core.step_clock import StepClock
from measure.core.wrapping import Training, wrap
from measure.memory_probe import Probe

# An algorithm may keep a flag or a counter; this much would change no figure of the table.
_KEPT_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Measured:
    """What one rank saw of its turn. Memory in bytes, see Probe; None where it cannot be told."""

    step_seconds: list[float]  # see Turn.measure
    steps: int  # that were measured
    losses: list[float]  # of these steps
    parameters: int  # elements
    gradients: int  # tensors
    peak_bytes: int | None  # of the whole turn, the making of the model with it
    steps_peak_bytes: int | None  # of the measured steps
    own_cores: float  # see CpuShare; of the measured steps
    machine_busy: float | None
    averagings: int | None  # given to the parameters in the measured steps; None: it does not average during its steps


class Turn:
    """Use as `with Turn(...) as turn:`, at whose end the model is gone; what is left of it then says `kept`."""

    def __init__(self, algorithm: str, device: torch.device) -> None:
        self._algorithm = algorithm
        self._device = device
        self._workload: Workload | None = None
        self._training: Training | None = None
        self._watch: weakref.ref[nn.Module] | None = None
        self._memory = Probe.where_possible(device)
        self._steps = 0
        self._losses: list[torch.Tensor] = []  # of the steps; not waited for
        self._is_finished = False

    def __enter__(self) -> Turn:
        if self._memory is not None:
            self._memory.begin()
            self._memory.restart()
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
        self._losses.clear()
        # Wrappers hook themselves into the model, and so are cycles.
        gc.collect()
        if self._device.type == "cuda":
            # cuBLAS's workspaces, one for each thread and stream that multiplied, live in torch's memory: the next
            # algorithm would find those of this one.
            clear: Any = torch._C
            clear._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def wrap(self, workload: Workload, *, warmup: int) -> None:
        self._workload = workload
        self._watch = weakref.ref(workload.model)
        self._training = wrap(
            self._algorithm,
            workload.model,
            workload.optimizer,
            self._device,
            warmup=warmup,
            is_bf16=workload.autocast,
        )

    def finish(self) -> None:
        """No communication after this; parameters may be looked at. A second call does nothing."""
        if self._training is not None and not self._is_finished:
            self._training.finish()
        self._is_finished = True

    @property
    def model(self) -> nn.Module:
        assert self._workload is not None
        return self._workload.model

    def trained(self) -> nn.Module:
        """With all parameters. On all ranks, after `finish`."""
        assert self._training is not None
        return self.model if self._training.whole is None else self._training.whole()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def measure(self, steps: int, warmup: int) -> Measured:
        """The seconds of each of `steps` steps; of an algorithm that averages during its steps, those of the mean step
        of each of as many cycles, or fewer: see AveragingCycles.

        Raises:
            RuntimeError: an average took too long.
        """
        assert self._training is not None
        clock = StepClock(self._device)
        self.train(warmup)
        averaging = self._training.averaging
        cycles: AveragingCycles | None = None
        if averaging is not None:
            cycles = AveragingCycles(averaging, steps, self._step, largest_of_ranks(self._device))
            cycles.begin()
        build_peak = self._peak()
        # No waiting here: the first step shall find the queue of kernels as full as the others do (but of cycles, on
        # which ranks agree). The count of allocated bytes is the host's and needs none.
        if self._memory is not None:
            self._memory.restart()
        cpus = CpuClock()
        clock.mark()
        if cycles is None:
            for _ in range(steps):
                self._step()
                clock.mark()
        else:
            cycles.train(clock.mark)
        seconds = clock.seconds()
        share = cpus.share()
        steps_peak = self._peak()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return Measured(
            step_seconds=seconds if cycles is None else cycles.mean_steps(seconds),
            steps=len(seconds),
            losses=torch.stack(self._losses[-len(seconds) :]).tolist(),
            parameters=sum(parameter.numel() for parameter in parameters),
            gradients=len(parameters),
            peak_bytes=None if build_peak is None or steps_peak is None else max(build_peak, steps_peak),
            steps_peak_bytes=steps_peak,
            own_cores=share.own_cores,
            machine_busy=share.machine_busy,
            averagings=None if cycles is None else cycles.number,
        )

    def kept(self) -> str | None:
        """After the `with`: what was not freed and is charged to the next algorithm; None if all was."""
        if self._watch is not None and self._watch() is not None:
            return "its model is still referenced by something"
        # On a CPU nobody can tell.
        kept_bytes = self._memory.use().kept if self._memory is not None and self._device.type == "cuda" else 0
        return None if kept_bytes <= _KEPT_LIMIT_BYTES else f"{kept_bytes >> 20} MiB of GPU memory are still allocated"

    def _peak(self) -> int | None:
        return None if self._memory is None else self._memory.use().peak

    def _step(self) -> None:
        assert self._workload is not None
        assert self._training is not None
        optimizer = self._training.optimizer
        optimizer.zero_grad(set_to_none=True)
        loss = self._workload.loss(self._training.forward, self._steps)
        loss.backward()
        optimizer.step()
        self._steps += 1
        self._losses.append(loss.detach())
