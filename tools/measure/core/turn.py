"""An algorithm's turn on one rank: a fresh model is built, wrapped, trained for some steps and freed.

Every algorithm finds the same memory: what the one before it held has been given back to the driver.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from measure.core.models import Workload
from measure.core.wrapping import Averaging, Training, wrap
from measure.memory_probe import Probe

# An algorithm may keep a flag or a counter; this much would change no figure of the table.
_KEPT_LIMIT_BYTES = 1 << 20
# What measured cycles may take together, if there are several.
_SEVERAL_CYCLES_S = 8.0
# An average of half a gigabyte takes 9 s at 1 Gb/s with a round trip of 40 ms.
_LONGEST_CYCLE_S = 90.0


class StepClock:
    """When steps end: on a GPU by events on the training stream, so that the host is free to run ahead as it is in a
    real training; on a CPU by the clock. `mark` at the beginning of the first step and at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if not self._is_cuda:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Of each step; waits for the last."""
        if not self._is_cuda:
            return [end - begin for begin, end in zip(self._times[:-1], self._times[1:], strict=True)]
        self._events[-1].synchronize()
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


@dataclass(frozen=True)
class CpuShare:
    """Between two readings."""

    own_cores: float  # CPUs that this process kept busy, on average
    machine_busy: float | None  # of all CPUs' time, by anybody and the kernel; 0 to 1


class CpuClock:
    """Reads at once when made, and when asked."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._own = time.process_time()
        self._machine = _machine_ticks()

    def share(self) -> CpuShare:
        seconds = time.perf_counter() - self._began
        own = time.process_time() - self._own
        busy_before, all_before = self._machine
        busy, everything = _machine_ticks()
        ticks = everything - all_before
        return CpuShare(own / max(seconds, 1e-9), (busy - busy_before) / ticks if ticks > 0 else None)


def _machine_ticks() -> tuple[int, int]:
    """(busy, all) of all CPUs since the machine started."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    idle = fields[3] + fields[4]  # idle, and idle with a disk at work
    return sum(fields) - idle, sum(fields)


def largest_of_ranks(device: torch.device) -> Callable[[int], int]:
    """Of torch's default group, all of whose ranks call it; `device` is where it communicates."""

    def largest(value: int) -> int:
        values = torch.tensor(value, device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return int(values)

    return largest


class AveragingCycles:
    """The steps of an algorithm that averages during its training, measured in whole cycles. Of one turn, on one rank;
    all ranks make the same calls.

    A cycle runs from the step in which parameters are given an average to the step in which they are given the next
    one. It may have three steps or three hundred, which are not alike: a few of them taken somewhere may show what a
    rank does that is alone. So the measurement begins and ends with an average, the same two on all ranks, and what is
    reported of each cycle is its mean step.

    Args:
        averaging: of the algorithm.
        wanted: cycles to be measured; fewer where they are long, one at least.
        step: trains one step.
        largest: of the ranks' values; see largest_of_ranks.
    """

    def __init__(
        self,
        averaging: Averaging,
        wanted: int,
        step: Callable[[], object],
        largest: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._averaging = averaging
        self._wanted = wanted
        self._step = step
        self._largest = largest
        self._clock = clock
        self._ends: list[int] = []  # of the cycles: steps made until then, the first without any

    @property
    def number(self) -> int:
        """Of the measured cycles."""
        return len(self._ends) - 1

    def begin(self) -> None:
        """Train until an average has just been given on all ranks, and agree on the number of cycles.

        Raises:
            RuntimeError: none was given in time.
        """
        self._train_until(self._largest(self._averaging.count()) + 1)
        fitting = int(_SEVERAL_CYCLES_S / max(self._averaging.seconds(), 1e-3))
        self._wanted = -self._largest(-max(1, min(self._wanted, fitting)))

    def train(self, after_step: Callable[[], None]) -> None:
        """Train the cycles that are measured.

        Raises:
            RuntimeError: an average was not given in time.
        """
        first, steps = self._averaging.count(), 0

        def count() -> None:
            nonlocal steps
            steps += 1
            after_step()

        self._ends = [0]
        for number in range(1, self._wanted + 1):
            self._train_until(first + number, count)
            self._ends.append(steps)

    def mean_steps(self, step_seconds: Sequence[float]) -> list[float]:
        """Of each cycle, from the seconds of all steps of `train`."""
        assert len(step_seconds) == self._ends[-1]
        return [sum(step_seconds[begin:end]) / (end - begin) for begin, end in itertools.pairwise(self._ends)]

    def _train_until(self, averages: int, after_step: Callable[[], None] = lambda: None) -> None:
        deadline = self._clock() + _LONGEST_CYCLE_S
        while self._averaging.count() < averages:
            if self._clock() > deadline:
                raise RuntimeError(
                    f"no average was given to the parameters in {_LONGEST_CYCLE_S:g} s of training; the network is too"
                    " slow for this model: take a smaller one (--model, --length)"
                )
            self._step()
            after_step()


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
