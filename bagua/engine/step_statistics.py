"""How long steps take, and how much of that is communication: `bagua_ddp.stats()`.

One `PassRecorder` per engine, written by the scheduler of the plan in use: on the training thread, and for what the
communication thread runs, there. Operations are timed in every SAMPLE_EVERY-th pass; what a pass waits for on a CPU, in
all. On average that takes 1.5 us of a pass with four buckets on CPUs.

Where ranks make steps of their own, and communicate after some of them, what is between two of these is measured as
well: `begin_own_step`, `end_own_step`. Then a pass is an exchange, and the computing time of a step is that of these.

[Note: on GPUs] nothing waits on the host. In a sampled pass all buckets go through the group's stream, between two
events, and a third one on the stream of the backward pass tells when its gradients were done. They are read some passes
later, when the GPU has passed them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bagua.engine.bucket import Bucket
from bagua.tuning.sampled_steps import SAMPLE_EVERY, UnreadSamples, is_sampled, median, typical

WINDOW = 64  # passes that the figures are of
KEPT = 4 * WINDOW  # times of steps, by which ranks are compared
COMPARABLE = SAMPLE_EVERY  # steps of which, on GPUs too, one at least says what it waited for

_logger = logging.getLogger("bagua")


@dataclass(frozen=True)
class BucketTime:
    """
    Attributes:
        name: of the bucket.
        nbytes: of its tensors, before compression.
        communication_s: of its operations, median.
        launched_s: how long before the end of the backward pass they were started, median.
    """

    name: str
    nbytes: int
    communication_s: float
    launched_s: float


@dataclass(frozen=True)
class StepStatistics:
    """Medians over the last WINDOW steps that communicated. NaN: not known yet.

    Attributes:
        steps: how many communicated so far.
        step_s: from one to the next.
        communication_s: the operations of all buckets, one after the other.
        exposed_s: of that, what the step waits for after its gradients are done.
        nbytes: of tensors that are communicated in a step, before compression.
        buckets: in launch order.
    """

    steps: int
    step_s: float
    communication_s: float
    exposed_s: float
    nbytes: int
    buckets: tuple[BucketTime, ...]

    @property
    def hidden_s(self) -> float:
        """Of the communication, what runs while gradients are computed."""
        return max(0.0, self.communication_s - self.exposed_s)

    def __str__(self) -> str:
        if self.steps == 0:
            return "no step has communicated yet; what an algorithm communicates on a thread of its own is not measured"
        step = "step not measured yet" if math.isnan(self.step_s) else f"step {1e3 * self.step_s:.3g} ms"
        if math.isnan(self.communication_s) or math.isnan(self.exposed_s):
            return f"{step}; communication not measured yet: one step in {SAMPLE_EVERY} is, after {self.steps} so far"
        share = f" ({100 * self.exposed_s / self.step_s:.0f} % of the step)" if self.step_s > 0 else ""
        return (
            f"{step}; communication {1e3 * self.communication_s:.3g} ms, of which exposed"
            f" {1e3 * self.exposed_s:.3g} ms{share}; {self.nbytes / (1 << 20):.3g} MiB in"
            f" {len(self.buckets)} {'bucket' if len(self.buckets) == 1 else 'buckets'}"
        )


@dataclass
class _Sample:
    """Of one pass."""

    buckets: list[tuple[str, int]] = field(default_factory=list)
    launched_at: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    launched_s: dict[str, float] = field(default_factory=dict)
    events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=dict)
    gradients_done: torch.cuda.Event | None = None
    number: int = 0  # of the pass, from 1

    @property
    def is_complete(self) -> bool:
        """The GPU has passed all events. The stream of the backward pass may be the last."""
        last = [end for _, end in self.events.values()]
        if self.gradients_done is not None:
            last.append(self.gradients_done)
        return all(event.query() for event in last)  # type: ignore[no-untyped-call]

    def read_events(self) -> float | None:
        """The exposed time, in s; None without GPUs. Communication is added to `seconds`."""
        if self.gradients_done is None:
            return None
        exposed = 0.0
        for name, (begin, end) in self.events.items():
            self.seconds[name] = 1e-3 * begin.elapsed_time(end)
            self.launched_s[name] = 1e-3 * begin.elapsed_time(self.gradients_done)
            exposed = max(exposed, 1e-3 * self.gradients_done.elapsed_time(end))
        return exposed


@dataclass(frozen=True)
class _OwnStep:
    """On a GPU, between two events."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def is_complete(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]


class PassRecorder:
    """Of one engine.

    Attributes:
        samples_all: every pass is sampled.
        log_every: in so many steps; 0: never.
        latest_at: when a step ended last, by the clock; None: there was none.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.samples_all = False
        self.log_every = 0
        self._clock = clock
        self._passes = 0
        self.latest_at: float | None = None
        self._last_end: float | None = None
        self._step_s: deque[float] = deque(maxlen=KEPT)
        self._exposed_s: deque[tuple[int, float]] = deque(maxlen=KEPT)  # with the number of the pass
        self._samples: deque[_Sample] = deque(maxlen=max(2, WINDOW // SAMPLE_EVERY))
        self._unread: UnreadSamples[_Sample] = UnreadSamples()
        self._sample: _Sample | None = None
        self._own_s: deque[float] = deque(maxlen=KEPT)
        self._unread_own: UnreadSamples[_OwnStep] = UnreadSamples(KEPT)
        self._own_begin: float | torch.cuda.Event | None = None

    # --- written by the scheduler ------------------------------------------------------------------------------------

    @property
    def is_sampling(self) -> bool:
        """Whether the operations of this pass are timed."""
        return self._sample is not None

    def begin_pass(self, first: Bucket) -> None:
        """Before the first bucket of a pass is launched."""
        is_due = self.samples_all or is_sampled(self._passes)
        # Events of a captured graph have no times.
        if is_due and first.is_on_gpu and torch.cuda.is_current_stream_capturing():
            is_due = False
        self._sample = _Sample() if is_due else None

    def launched(self, bucket: Bucket) -> None:
        """In a sampled pass."""
        assert self._sample is not None
        self._sample.buckets.append((bucket.name, bucket.flattened_tensor().nbytes))
        self._sample.launched_at[bucket.name] = self._clock()

    def is_over(self, bucket: Bucket) -> None:
        """In a sampled pass: the bucket was waited for. One that went on by itself on a CPU may have been over before,
        which nobody saw."""
        sample = self._sample
        assert sample is not None
        if not bucket.is_on_gpu and bucket.name not in sample.seconds:
            sample.seconds[bucket.name] = self._clock() - sample.launched_at[bucket.name]

    def timed(self, bucket: Bucket, run: Callable[[], None]) -> Callable[[], None]:
        """Of a sampled pass: `run`, which does the bucket's operations, on any thread."""
        sample = self._sample
        assert sample is not None

        def timed() -> None:
            begin = self._clock()
            run()
            sample.seconds[bucket.name] = self._clock() - begin

        return timed

    def queued(self, bucket: Bucket, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Of a sampled pass: the bucket's operations are between these events of the group's stream."""
        assert self._sample is not None
        self._sample.events[bucket.name] = begin, end

    def end_pass(self, waited_s: float | None, gradients_done: torch.cuda.Event | None) -> None:
        """All buckets were waited for.

        Args:
            waited_s: on the host; None on GPUs, where it says nothing.
            gradients_done: in a sampled pass on GPUs, recorded before the streams were made to wait.
        """
        now = self._clock()
        if self._last_end is not None:
            self._step_s.append(now - self._last_end)
        self._last_end = self.latest_at = now
        self._passes += 1
        sample, self._sample = self._sample, None
        if waited_s is not None:
            self._exposed_s.append((self._passes, waited_s))
        if sample is None:
            return
        if gradients_done is None:
            if waited_s is not None:
                end = now - waited_s
                sample.launched_s = {name: end - at for name, at in sample.launched_at.items()}
            self._samples.append(sample)
        else:
            sample.gradients_done, sample.number = gradients_done, self._passes
            self._unread.add(sample)
            self._read()

    def forget(self) -> None:
        """The buckets are others from now on."""
        self._samples.clear()
        self._unread.clear()
        self._sample = None

    def begin_anew(self) -> None:
        """The figures are of what follows."""
        self.forget()
        self._step_s.clear()
        self._exposed_s.clear()
        self._own_s.clear()
        self._unread_own.clear()
        self._own_begin = None

    # --- written by algorithms whose ranks make steps of their own ---------------------------------------------------

    def begin_own_step(self, device: torch.device) -> None:
        """What this rank does from now on, until `end_own_step`, waits for no other one."""
        self._own_begin = self._clock() if device.type != "cuda" else _event_now(device)

    def end_own_step(self, device: torch.device) -> None:
        """If one has begun, its time is known; on a GPU, when that has come so far."""
        begin, self._own_begin = self._own_begin, None
        self.latest_at = self._clock()
        if isinstance(begin, float):
            self._own_s.append(self.latest_at - begin)
        elif begin is not None:
            end = _event_now(device)
            if end is not None:
                self._unread_own.add(_OwnStep(begin, end))
                self._read()

    # --- read by users -----------------------------------------------------------------------------------------------

    def log(self, name: str, steps: int) -> None:
        """After so many steps of the module of this name: say what they took, if it is time to."""
        if self.log_every and steps and steps % self.log_every == 0:
            _logger.info(f"{name}: step {steps}: {self.statistics()}")

    def statistics(self) -> StepStatistics:
        self._read()
        latest = self._samples[-1] if self._samples else _Sample()
        buckets = tuple(
            BucketTime(
                name,
                nbytes,
                median(one.seconds[name] for one in self._samples if name in one.seconds),
                median(one.launched_s[name] for one in self._samples if name in one.launched_s),
            )
            for name, nbytes in latest.buckets
        )
        return StepStatistics(
            self._passes,
            median(list(self._step_s)[-WINDOW:]),
            sum(bucket.communication_s for bucket in buckets) if buckets else float("nan"),
            median([exposed for _, exposed in self._exposed_s][-WINDOW:]),
            sum(bucket.nbytes for bucket in buckets),
            buckets,
        )

    def latest(self, steps: int, middle: Callable[[Sequence[float]], float] = typical) -> tuple[int, float, float]:
        """Of the last steps, at most `steps` of them and of those that are kept: how many are measured, the middle of
        what they take, and of what they wait for after their gradients are done, in s; NaN where there is none: on
        GPUs, in fewer than COMPARABLE steps. On any thread."""
        if self._own_s:
            own = list(self._own_s)[-steps:]
            return len(own), middle(own), 0.0
        taken = list(self._step_s)[-steps:]
        exposed = [one for number, one in list(self._exposed_s) if number > self._passes - steps]
        return len(taken), middle(taken), middle(exposed)

    def _read(self) -> None:
        for sample in self._unread.take():
            exposed = sample.read_events()
            if exposed is not None:
                self._exposed_s.append((sample.number, exposed))
            self._samples.append(sample)
        for step in self._unread_own.take():
            self._own_s.append(1e-3 * step.begin.elapsed_time(step.end))


def _event_now(device: torch.device) -> torch.cuda.Event | None:
    """On the current stream. None: what is captured has no times."""
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
