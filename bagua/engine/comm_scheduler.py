"""Launches buckets in one fixed order, each as soon as it and all before it are ready, and waits for them.

The order is what keeps the ranks together: autograd makes gradients in an order of its own, and collectives that two
ranks start in different orders wait for each other for ever. The buckets form a queue. A tensor that becomes ready is
marked; when the bucket at the front has all its marks, they are taken back, its operations start, and it goes to the
end of the queue, so that the next round of marks finds the same order.

Marks come from autograd's threads (one per device), launches happen there. An operation that goes on in the background
by itself (`inline`), alone in its bucket, is started on the spot. Others are queued, with CUDA, on the group's stream;
the host never waits. On CPU the group's communication thread runs them (bagua.engine.comm_thread).

[Note: streams of marks] With CUDA, autograd makes each gradient on the stream that was current in its forward pass. A
bucket may have tensors of several (branches of a model that run side by side), and it may be launched by the mark of
another bucket, on another device even. So its marks note their streams, and the stream that is current at the launch
waits for all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from bagua.collectives import torch_internals
from bagua.engine.bucket import Bucket
from bagua.engine.comm_thread import CommThread, has_thread, join_thread
from bagua.engine.failure_report import failures_named

if TYPE_CHECKING:
    import torch.distributed as dist

    from bagua.collectives.process_group import BaguaProcessGroup


class CommScheduler:
    """Of one module.

    Args:
        buckets: in launch order, the same on all ranks.
        group: whose stream carries the operations.

    Raises:
        ValueError: a tensor, or its name, is in two buckets.
    """

    def __init__(self, buckets: Sequence[Bucket], group: BaguaProcessGroup) -> None:
        _check_distinct(buckets)
        self._group = group
        self._states = [_BucketState(bucket) for bucket in buckets]
        self._queue = deque(self._states)
        self._started: list[_Started] = []
        # The buckets of the pass that was waited for last.
        self.sent: list[Bucket] = []
        # Guards all below, and the states of the buckets but for their marks.
        self.lock = threading.RLock()
        self._thread: CommThread | None = None
        self._leave_thread: Callable[[], object] | None = None
        for state in self._states:
            for index, record in enumerate(state.bucket.records):
                record.mark_ready = _marker(self, state, index)

    # --- marks and launches ------------------------------------------------------------------------------------------

    def launch_complete(self) -> None:
        """The last mark of a bucket was made: launch it and those behind it, as far as they are complete."""
        with self.lock:
            while self._queue[0].may_launch:
                self._launch(self._queue[0])

    def _launch(self, state: _BucketState) -> None:
        self._queue.rotate(-1)
        streams = state.other_streams()
        state.reset()
        state.launched_in_pass = state.launched_in_step = True
        bucket = state.bucket
        with failures_named(self._group, "starting the communication of a bucket"):
            self._started.append(self._start(bucket, streams))

    def _start(self, bucket: Bucket, streams: Sequence[torch.cuda.Stream]) -> _Started:
        if streams:
            _wait_for_marks(bucket, streams)
        is_inline = len(bucket.ops) == 1 and bucket.ops[0].inline
        is_on_gpu = bucket.device.type == "cuda"
        if is_on_gpu and not is_inline:
            return self._start_on_stream(bucket)
        bucket.gather()
        # Once there is a thread, all that is on CPU goes there: it may still have to start operations that come before
        # this one. What is on a GPU has another order, and what its streams wait for is known on this thread alone.
        if is_inline and (is_on_gpu or not has_thread(self._group)):
            return _Started(bucket, work=bucket.ops[0].run(bucket))
        if self._thread is None:
            self._thread = join_thread(self._group)
            self._leave_thread = weakref.finalize(self, self._thread.leave)
        return _Started(bucket, future=self._thread.submit(lambda: run_ops(bucket)))

    def _start_on_stream(self, bucket: Bucket) -> _Started:
        stream = self._group.stream_on(bucket.device)
        bucket.gather()
        # Whoever drops the module while operations are under way must not let others have its memory.
        bucket.keep_for(stream)
        current = torch.cuda.current_stream(bucket.device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                run_ops(bucket)
                bucket.scatter()
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
        except BaseException:
            current.wait_stream(stream)  # some operations may be under way, and nobody waits for them any more
            raise
        return _Started(bucket, event=event)

    # --- the end of a pass -------------------------------------------------------------------------------------------

    def wait_pending_comm_ops(self) -> None:
        """Results of all launched buckets are in place for what follows: on CPU on return, with CUDA on the current
        stream. The next pass may begin.

        Raises:
            RuntimeError: communication failed; names the ranks that are gone, where that can be found out.
        """
        with self.lock:
            for state in self._states:
                state.held = False
            self.launch_complete()
            started, self._started = self._started, []
            for state in self._states:
                state.launched_in_pass = False
                state.held = state.is_marked
                if state.held:
                    state.bucket.unscale()
            self.sent = [one.bucket for one in started]
        if not started:
            return
        with failures_named(self._group, "waiting for the buckets of a backward pass"):
            for one in started:
                one.wait()

    @property
    def has_begun(self) -> bool:
        """Whether anything was marked or launched since the last `end_step`."""
        return any(state.launched_in_step or state.is_marked for state in self._states)

    def end_step(self) -> list[str]:
        """Names of the tensors that were not communicated while others were, since the last call. A complete step, or
        none at all, gives an empty list."""
        with self.lock:
            names: list[str] = []
            if self.has_begun:
                for state in self._states:
                    if state.is_marked or not state.launched_in_step:
                        names.extend(state.unmarked_names())
            for state in self._states:
                state.launched_in_step = False
            return names

    def reset(self) -> None:
        """Forget all marks and restore the order: after an error, before a new beginning. What was launched has been
        waited for."""
        with self.lock:
            self._queue = deque(self._states)
            for state in self._states:
                state.reset()
                state.bucket.forget_scaled()
                state.launched_in_pass = state.launched_in_step = state.held = False

    def close(self) -> None:
        """Take the marks' functions back from the tensors and leave the thread."""
        for state in self._states:
            for record in state.bucket.records:
                record.mark_ready = None
        if self._leave_thread is not None:
            self._leave_thread()
            self._thread = self._leave_thread = None


def run_ops(bucket: Bucket) -> None:
    """All operations of the bucket, one after the other, on this thread and the current stream."""
    for op in bucket.ops:
        work = op.run(bucket)
        if work is not None:
            work.wait()


class _BucketState:
    """
    Attributes:
        ready: a mark for each tensor.
        missing: how many lack it.
        launched_in_pass: until the pass is waited for.
        launched_in_step: until the step ends.
        held: it has marks of an earlier pass, whose gradients this pass may add to: it is launched at the end of it.
        raw_streams: with CUDA, the streams of the marks, as the driver knows them, each when another one was current
            than at the mark before.
        streams: all that marks were ever made on, by these numbers.
    """

    __slots__ = (
        *("bucket", "held", "launched_in_pass", "launched_in_step", "missing", "raw_streams", "ready", "streams"),
    )

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.reset()
        self.launched_in_pass = self.launched_in_step = self.held = False

    @property
    def may_launch(self) -> bool:
        return self.missing == 0 and not self.launched_in_pass and not self.held

    @property
    def is_marked(self) -> bool:
        return self.missing < len(self.ready)

    def unmarked_names(self) -> list[str]:
        return [record.name for record, ready in zip(self.bucket.records, self.ready, strict=True) if not ready]

    def reset(self) -> None:
        self.ready = bytearray(len(self.bucket.tensors))
        self.missing = len(self.bucket.tensors)
        self.raw_streams: list[int] = []

    def other_streams(self) -> list[torch.cuda.Stream]:
        """Those of the marks but for the one that is current now."""
        if not self.raw_streams:
            return []
        current = torch_internals.raw_stream(self.bucket.device)
        return [self.streams[raw] for raw in dict.fromkeys(self.raw_streams) if raw != current]


class _Started:
    """A launched bucket: exactly one of its three ways to be waited for."""

    def __init__(
        self,
        bucket: Bucket,
        work: dist.Work | None = None,
        future: Future[None] | None = None,
        event: torch.cuda.Event | None = None,
    ) -> None:
        self.bucket = bucket
        self._work = work
        self._future = future
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self.bucket.device).wait_event(self._event)
            return
        if self._future is not None:
            self._future.result()
        if self._work is not None:
            self._work.wait()
        self.bucket.scatter()


def _marker(scheduler: CommScheduler, state: _BucketState, index: int) -> Callable[[], None]:
    """Runs once per tensor and step, so it is short. Without the lock: the tensors of a bucket are of one device, whose
    gradients one thread makes, and reentrant passes wait for each other."""

    bucket = state.bucket
    one_by_one = bucket.gathers_one_by_one

    def mark() -> None:
        if state.launched_in_pass or bucket.is_scaled[index]:
            raise RuntimeError(
                f"{bucket.records[index].name!r} became ready again after it was taken for communication: one backward"
                " pass made its gradient twice. Reentrant activation checkpointing of a module that is used more than"
                " once does that; use checkpoint(..., use_reentrant=False)"
            )
        if not state.ready[index]:
            state.ready[index] = 1
            if one_by_one and not state.held:
                bucket.gather_one(index)
            state.missing -= 1
            if state.missing == 0:
                scheduler.launch_complete()

    device = bucket.device
    if device.type != "cuda":
        return mark

    def mark_on_stream() -> None:
        # torch.cuda.current_stream makes an object, which costs more than the whole mark.
        raw = torch_internals.raw_stream(device)
        if not state.raw_streams or raw != state.raw_streams[-1]:
            state.raw_streams.append(raw)
            if raw not in state.streams:
                state.streams[raw] = torch.cuda.current_stream(device)
        mark()

    return mark_on_stream


def _wait_for_marks(bucket: Bucket, streams: Sequence[torch.cuda.Stream]) -> None:
    """See the note at the head of this file."""
    current = torch.cuda.current_stream(bucket.device)
    for stream in streams:
        current.wait_stream(stream)
    bucket.keep_gradients_for(current)


def _check_distinct(buckets: Sequence[Bucket]) -> None:
    names: dict[str, str] = {}
    proxies: dict[int, str] = {}
    for bucket in buckets:
        for tensor, record in zip(bucket.tensors, bucket.records, strict=True):
            other = names.get(record.name) or proxies.get(id(tensor))
            if other is not None:
                raise ValueError(f"tensor {record.name!r} of bucket {bucket.name!r} is already in bucket {other!r}")
            names[record.name] = proxies[id(tensor)] = bucket.name
