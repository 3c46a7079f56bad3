"""What a rank does for `measure core`, `networks` and `nics`: see measure.rank. All algorithms take their turns in this
process, in one process group: in a turn, a fresh model is built, wrapped, trained for some steps and freed.

Every algorithm finds the same memory: what the one before it held has been given back to the driver.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from measure.core.catalogue import REFERENCE
from measure.core.models import Workload, build, example
from measure.core.wrapping import Averaging, Training, wrap
from measure.core.wrapping import prepare as prepare_algorithms
from measure.memory_probe import Probe

_COMPRESSION = "bagua.kernels._minmax_uint8"
# An algorithm may keep a flag or a counter; this much would change no figure of the table.
_KEPT_LIMIT_BYTES = 1 << 20
# What measured cycles may take together, if there are several.
_SEVERAL_CYCLES_S = 8.0
# An average of half a gigabyte takes 9 s at 1 Gb/s with a round trip of 40 ms.
_LONGEST_CYCLE_S = 90.0

# DDP's training of each model: parameters where it began and where it ended. Rank 0 keeps it, since all ranks have the
# same, which the fingerprints show.
_references: dict[str, tuple[list[Tensor], list[Tensor]]] = {}


def prepare(device: torch.device, algorithms: Sequence[str], deterministic: bool) -> dict[str, Any]:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    prepare_algorithms(algorithms)
    # A source tree on PYTHONPATH has no compiled compression. Algorithms that compress on CPUs then take several times
    # as long as for users, and nothing else shows it.
    package = importlib.util.find_spec("bagua") if device.type == "cpu" else None
    lacks = package is not None and importlib.util.find_spec(_COMPRESSION) is None
    return {"python_compression": str(package.origin)} if package is not None and lacks else {}


def settle(device: torch.device, algorithm: str, steps: int, warmup: int, **size: Any) -> None:
    """Trains, and forgets it."""
    with Turn(device, algorithm, warmup, **size) as found:
        found.train(steps)


def turn(device: torch.device, algorithm: str, steps: int, warmup: int, **size: Any) -> dict[str, Any]:
    model = size["model"]
    keeps = dist.get_rank() == 0 and algorithm == REFERENCE and model not in _references
    largest = relative = None
    with Turn(device, algorithm, warmup, **size) as found:
        start = _on_host(found.model) if keeps else []
        measured = found.measure(steps, warmup)
        trained = found.trained()
        fingerprint = example().fingerprint(trained, device).tolist()
        if keeps:
            _references[model] = start, _on_host(trained)
        elif model in _references:
            largest, relative = _difference(*_references[model], trained)
        del trained
    differences = {"largest_difference": largest, "relative_difference": relative}
    return {**measured, **differences, "fingerprint": fingerprint, "kept": found.kept()}


def all_reduce(device: torch.device, size_bytes: int, seconds: float) -> dict[str, float]:
    """Seconds of an all-reduce of float32: of as many as take about `seconds`, one after the other, after one that is
    checked.

    Raises:
        RuntimeError: a sum is wrong.
    """
    ranks = dist.get_world_size()
    buffer = torch.full((size_bytes // 4,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(buffer)
    if not bool((buffer == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"an all-reduce of {size_bytes} bytes has a wrong sum")
    buffer.zero_()
    once = torch.tensor([_seconds(device, buffer, 2)], device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)
    count = min(1000, max(2, round(seconds / once.item())))
    return {"seconds": _seconds(device, buffer, count)}


def _seconds(device: torch.device, buffer: torch.Tensor, count: int) -> float:
    clock = StepClock(device)
    clock.mark()
    for _ in range(count):
        dist.all_reduce(buffer)
    clock.mark()
    return clock.seconds()[0] / count


def _on_host(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()]


def _difference(start: Sequence[Tensor], end: Sequence[Tensor], model: nn.Module) -> tuple[float, float]:
    """Between two final models: of all elements the largest, absolute; and the length of the difference over the length
    of the way from the start. A value that is no number makes both infinite: it is equal to nothing."""
    largest = squared = way_squared = 0.0
    for begin, reached, parameter in zip(start, end, model.parameters(), strict=True):
        gap = parameter.detach().to("cpu") - reached
        if not bool(torch.isfinite(gap).all()):
            return float("inf"), float("inf")
        largest = max(largest, float(gap.abs().max()))
        squared += float(torch.linalg.vector_norm(gap, dtype=torch.float64)) ** 2
        way_squared += float(torch.linalg.vector_norm(reached - begin, dtype=torch.float64)) ** 2
    if squared == 0.0:
        return 0.0, 0.0
    return largest, (squared / way_squared) ** 0.5 if way_squared else float("inf")


class StepClock:
    """When steps end: on a GPU by events on the training stream, so that the host is free to run ahead as it is in a
    real training; on a CPU by the clock. `mark` at the beginning of the first step and at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Of each step; waits for the last."""
        pairs = itertools.pairwise(self._marks)
        if not self._is_cuda:
            return [end - begin for begin, end in pairs]
        self._marks[-1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def _machine_ticks() -> tuple[int, int]:
    """(busy, all) of all CPUs since the machine started."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    idle = fields[3] + fields[4]  # idle, and idle with a disk at work
    return sum(fields) - idle, sum(fields)


class Turn:
    """Use as `with Turn(...) as turn:`, at whose end the model is gone; what is left of it then says `kept`."""

    def __init__(self, device: torch.device, algorithm: str, warmup: int, *, model: str, **size: Any) -> None:
        self._device = device
        self._memory = Probe.where_possible(device)
        if self._memory is not None:
            self._memory.begin()
            self._memory.restart()
        workload = build(model, device, rank=dist.get_rank(), **size)
        self._watch = weakref.ref(workload.model)
        self._workload: Workload | None = workload
        self._training: Training | None = wrap(
            algorithm, workload.model, workload.optimizer, device, warmup=warmup, is_bf16=workload.autocast
        )
        self._steps = 0
        self._losses: list[torch.Tensor] = []  # of the steps; not waited for
        self._is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ranks end together what communicates by itself; after an error the others may not come.
        if kind is None:
            self._finish()
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

    def _finish(self) -> None:
        """No communication after this. A second call does nothing."""
        if self._training is not None and not self._is_finished:
            self._training.finish()
        self._is_finished = True

    @property
    def model(self) -> nn.Module:
        assert self._workload is not None
        return self._workload.model

    def trained(self) -> nn.Module:
        """With all parameters, when there is no communication any more. On all ranks."""
        self._finish()
        assert self._training is not None
        return self.model if self._training.whole is None else self._training.whole()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def measure(self, steps: int, warmup: int) -> dict[str, Any]:
        """What this rank sees of its turn: the seconds of each of `steps` steps, and so on.

        An algorithm that averages during its training is measured in whole cycles: from the step in which parameters
        are given an average to the step in which they are given the next one. A cycle may have three steps or three
        hundred, which are not alike: a few of them taken somewhere may show what a rank does that is alone. So the
        measurement begins and ends with an average, the same two on all ranks, and what counts as a step is the mean
        one of each cycle, of as many cycles as there were to be steps, or fewer where they are long.

        Raises:
            RuntimeError: an average took too long.
        """
        assert self._training is not None
        averaging = self._training.averaging
        self.train(warmup)
        if averaging is not None:
            self._train_until(averaging, self._largest(averaging.count()) + 1)
            fitting = int(_SEVERAL_CYCLES_S / max(averaging.seconds(), 1e-3))
            steps = -self._largest(-max(1, min(steps, fitting)))
        build_peak = self._peak()
        # No waiting here: the first step shall find the queue of kernels as full as the others do (but of cycles, on
        # which ranks agree). The count of allocated bytes is the host's and needs none.
        if self._memory is not None:
            self._memory.restart()
        clock, (busy_before, all_before) = StepClock(self._device), _machine_ticks()
        ends, first = [self._steps], 0 if averaging is None else averaging.count()
        clock.mark()
        for number in range(1, steps + 1):
            if averaging is None:
                self._step()
                clock.mark()
            else:
                self._train_until(averaging, first + number, clock.mark)
            ends.append(self._steps)
        seconds = clock.seconds()
        busy, everything = _machine_ticks()
        steps_peak = self._peak()
        taken = [(begin - ends[0], end - ends[0]) for begin, end in itertools.pairwise(ends)]
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return {
            "step_seconds": [sum(seconds[begin:end]) / (end - begin) for begin, end in taken],
            "steps": len(seconds),
            "losses": torch.stack(self._losses[-len(seconds) :]).tolist(),
            "parameters": sum(parameter.numel() for parameter in parameters),
            # Of the whole turn, the making of the model with it, and of the measured steps; None: it cannot be told.
            "peak_bytes": None if build_peak is None or steps_peak is None else max(build_peak, steps_peak),
            "steps_peak_bytes": steps_peak,
            # Of all CPUs' time, by anybody and the kernel; 0 to 1.
            "machine_busy": (busy - busy_before) / (everything - all_before) if everything > all_before else None,
            "averagings": None if averaging is None else steps,
        }

    def kept(self) -> str | None:
        """After the `with`: what was not freed and is charged to the next algorithm; None if all was."""
        if self._watch() is not None:
            return "its model is still referenced by something"
        # On a CPU nobody can tell.
        kept_bytes = self._memory.use().kept if self._memory is not None and self._device.type == "cuda" else 0
        return None if kept_bytes <= _KEPT_LIMIT_BYTES else f"{kept_bytes >> 20} MiB of GPU memory are still allocated"

    def _peak(self) -> int | None:
        return None if self._memory is None else self._memory.use().peak

    def _largest(self, value: int) -> int:
        """Of all ranks, which call it together."""
        values = torch.tensor(value, device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return int(values)

    def _train_until(self, averaging: Averaging, averages: int, after_step: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + _LONGEST_CYCLE_S
        while averaging.count() < averages:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"no average was given to the parameters in {_LONGEST_CYCLE_S:g} s of training; the network is too"
                    " slow for this model: take a smaller one (--model, --length)"
                )
            self._step()
            after_step()

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
