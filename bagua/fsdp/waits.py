"""How long steps of an FSDP model wait for communication: measure_communication, with compression and without.

FSDP makes the compute stream wait in four places, where this looks at it: for the weights that a module gathers, before
a module's gradients are copied for the reduce-scatter, whose memory an earlier one still reads, and at the end of the
backward pass for all gradients. One step in SAMPLE_EVERY is looked at.

[Note: on GPUs] nothing waits on the host. Events tell when the compute stream came to such a place and when what it
waits for was done; they are read some steps later, when the GPU has passed them. On CPUs, where collectives are waited
for in the thread that asks for them, the thread's time is taken, in which it also copies into and out of messages.

Runs in the threads of forward and of autograd, one at a time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bagua.fsdp.model import ShardedModel
from bagua.fsdp.torch_internals import ShardedModule
from bagua.tuning.advice import most_to_gain
from bagua.tuning.sampled_steps import SAMPLE_EVERY, UnreadSamples, is_sampled, median

WINDOW = 16  # sampled steps that the figures are of
FEW_SAMPLES = 3  # fewer are named as such: the first steps compile, allocate and connect


@dataclass(frozen=True)
class StepWaits:
    """Medians over the last WINDOW steps that were looked at. NaN: not known yet.

    Attributes:
        steps: how many have begun.
        step_s: from one to the next.
        exposed_s: of that, what the step waits for communication: for gathered weights and for reduced gradients.
        samples: steps that were looked at, of which these are the medians.
    """

    steps: int
    step_s: float
    exposed_s: float
    samples: int

    @property
    def advice(self) -> str:
        """What compression could gain at most, or that communication is hidden; with a warning where few steps were
        looked at."""
        if math.isnan(self.step_s) or math.isnan(self.exposed_s):
            return f"not measured yet: one step in {SAMPLE_EVERY} is, after {self.steps} so far"
        gain = most_to_gain(self.step_s, self.exposed_s)
        if self.samples >= FEW_SAMPLES or not gain:
            return gain
        return f"{gain} (from {self._sampled}; measure at least {SAMPLE_EVERY * FEW_SAMPLES} steps)"

    @property
    def _sampled(self) -> str:
        return f"{self.samples} sampled step{'s' * (self.samples != 1)}"

    def __str__(self) -> str:
        if math.isnan(self.step_s) or math.isnan(self.exposed_s):
            return self.advice
        share = f"{100 * self.exposed_s / self.step_s:.0f} % of the step"
        exposed = f"exposed communication {1e3 * self.exposed_s:.3g} ms ({share})"
        return f"step {1e3 * self.step_s:.3g} ms; {exposed}; median of {self._sampled}"


Mark = float | torch.cuda.Event


@dataclass
class _Sample:
    """Of one step: when it began, when a wait began and was over, for each, and when the next step began."""

    begin: Mark
    end: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    last: tuple[Mark, Mark] | None = None  # at the end of the backward pass

    def end_pass(self) -> None:
        """The step goes on with another forward pass."""
        if self.last is not None:
            self.waits.append(self.last)
        self.last = None

    def add(self, begin: Mark, end: Mark) -> None:
        self.waits.append((begin, end))

    @property
    def all(self) -> list[tuple[Mark, Mark]]:
        return self.waits if self.last is None else [*self.waits, self.last]

    @property
    def is_complete(self) -> bool:
        """The GPU has passed all events."""
        marks = [mark for wait in self.all for mark in wait] + ([] if self.end is None else [self.end])
        return all(isinstance(mark, float) or mark.query() for mark in marks)  # type: ignore[no-untyped-call]

    @property
    def step_s(self) -> float:
        assert self.end is not None, "is_complete"
        return _between(self.begin, self.end)

    @property
    def exposed_s(self) -> float:
        """What was there before it was waited for took no time."""
        return sum(max(0.0, _between(*wait)) for wait in self.all)


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    seconds: float = 1e-3 * begin.elapsed_time(end)
    return seconds


class CommunicationMeter:
    """Measures until `remove` is called.

    Args:
        model: a step begins with its forward pass in training mode, and goes on until the next one after a backward
            pass that reduced gradients.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._device = model.modules[0].device
        self._step_s: deque[float] = deque(maxlen=WINDOW)
        self._exposed_s: deque[float] = deque(maxlen=WINDOW)
        self._unread: UnreadSamples[_Sample] = UnreadSamples()
        self._sample: _Sample | None = None
        self._side: torch.cuda.Stream | None = None
        self._reduced: deque[Mark] = deque()  # ends of reduce-scatters of this sample's backward pass
        self._steps = 0  # that have begun
        self._has_reduced = True  # this step, so that the next forward pass begins another
        model.follow_passes(begin=self._begin_pass)
        for one in model.modules:
            _Watch(one, self).install(model)

    def stats(self) -> StepWaits:
        """What the steps so far waited for."""
        self._read()
        return StepWaits(self._steps, median(self._step_s), median(self._exposed_s), len(self._step_s))

    def remove(self) -> None:
        """Measures no more."""
        self._model.remove()

    def _begin_pass(self) -> None:
        if self._has_reduced:
            self._begin_step()
        elif self._sample is not None:
            self._sample.end_pass()

    def _begin_step(self) -> None:
        self._has_reduced = False
        if self._sample is not None:
            self._sample.end = self.mark()
            self._unread.add(self._sample)
        self._read()
        is_due = is_sampled(self._steps)
        self._steps += 1
        if is_due and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            is_due = False  # events of a captured graph have no times
        self._sample = _Sample(self.mark()) if is_due else None
        self._reduced.clear()

    def _read(self) -> None:
        for sample in self._unread.take():
            self._step_s.append(sample.step_s)
            self._exposed_s.append(sample.exposed_s)

    # --- for _Watch --------------------------------------------------------------------------------------------------

    @property
    def sample(self) -> _Sample | None:
        """Of the step that is looked at now."""
        return self._sample

    def mark(self, stream: Any = None) -> Mark:
        """Now; on GPUs, when `stream` comes to it, by default the current one."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def mark_of(self, event: torch.cuda.Event) -> Mark:
        """When the GPU comes to `event`, which has no time of its own."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._side.wait_event(event)
        return self.mark(self._side)

    def note_reduction(self) -> None:
        """This backward pass reduces gradients: the step ends with it."""
        self._has_reduced = True

    def follow_reduction(self, begin: Mark, end: Mark, in_flight: int) -> None:
        """A module's backward pass came to its reduce-scatter at `begin`, which is over at `end`. At most `in_flight`
        may be on their way when the next one begins."""
        if self._sample is not None and len(self._reduced) == in_flight:
            self._sample.add(begin, self._reduced.popleft())
        self._reduced.append(end)


class _Watch:
    """Stands around what FSDP does for one module."""

    def __init__(self, one: ShardedModule, meter: CommunicationMeter) -> None:
        self._one = one
        self._meter = meter
        self._is_on_gpu = one.device.type == "cuda"
        self._gathered: Mark | None = None

    def install(self, model: ShardedModel) -> None:
        """Until the model's `remove`."""
        model.surround(self._one, "unshard", self._gather)
        model.surround(self._one, "wait_for_unshard", self._wait_for_weights)
        model.surround(self._one, "post_backward", self._reduce)
        model.surround(self._one, "finalize_backward", self._finish)

    @property
    def _sample(self) -> _Sample | None:
        return self._meter.sample if self._one.module.training else None

    def _gather(self, run: Callable[[], None], _: Any) -> None:
        if (sample := self._sample) is None:
            return run()
        begin, before = self._meter.mark(), self._one.pending_gather
        run()
        if self._one.pending_gather is before:
            return None
        if self._is_on_gpu:
            event = self._one.gather_event
            self._gathered = None if event is None else self._meter.mark_of(event)
        else:
            sample.add(begin, self._meter.mark())
        return None

    def _wait_for_weights(self, run: Callable[[], None], _: Any) -> None:
        sample = self._sample
        if sample is None or self._one.pending_gather is None:
            return run()
        begin = self._meter.mark()
        run()
        # Without an event of its own, a gather ends with the copies that follow.
        sample.add(begin, self._gathered or self._meter.mark())
        self._gathered = None
        return None

    def _reduce(self, run: Callable[[], None], _: Any) -> None:
        if self._one.reduces:
            self._meter.note_reduction()
        if (sample := self._sample) is None:
            return run()
        begin = self._meter.mark()
        run()
        if not self._is_on_gpu:
            sample.add(begin, self._meter.mark())
        elif self._one.reduces:
            end = self._meter.mark(self._one.reduce_stream)
            self._meter.follow_reduction(begin, end, self._one.reductions_in_flight)
        return None

    def _finish(self, run: Callable[[], None], _: Any) -> None:
        """Of all modules one after the other, between which nothing is computed."""
        if (sample := self._sample) is None:
            return run()
        begin = self._meter.mark() if sample.last is None else sample.last[0]
        run()
        sample.last = begin, self._meter.mark()
        return None


def measure_communication(model: nn.Module) -> CommunicationMeter:
    """Measures what steps of `model` wait for communication, whether `compress_communication` compresses it or not:

        meter = measure_communication(model)
        ...  # at least 24 steps, of which one in 8 is looked at
        print(meter.stats(), meter.stats().advice)

    Nothing is sent for it, and steps take a few microseconds more. A step ends with a backward pass that reduces
    gradients: those that `set_requires_gradient_sync(False)` keeps from it are part of a step.

    Args:
        model: as for `compress_communication`.

    Raises:
        ValueError: no module is `fully_shard`ed.
        RuntimeError: this version of torch is not supported.
    """
    return CommunicationMeter(ShardedModel(model))
