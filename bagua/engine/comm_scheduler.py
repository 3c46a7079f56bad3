"""Launches buckets in one fixed order, each as soon as it and all before it are ready, and waits for them.

The order is what keeps the ranks together: autograd makes gradients in an order of its own, and collectives that two
ranks start in different orders wait for each other indefinitely. The buckets form a queue. Each tensor has a ready
flag; when all flags of the bucket at the front are set, they are cleared, its operations start, and it goes to the end
of the queue, so that the next pass finds the same order.

The queue holds the *launch set* of the step: all buckets, unless the algorithm has chosen some of them
(`choose_buckets`). The others are not communicated in this step, and their ready flags mean nothing.

Flags are set on autograd's threads (one per device), launches happen there. An operation that goes on in the background
by itself (`inline`), alone in its bucket, is started on the spot. Others are queued, with CUDA, on the group's stream;
the host never waits. On CPU the group's communication thread runs them (bagua.engine.comm_thread).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from bagua.collectives.carrier_device import on_stream
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.tensor import TensorRecord, record_of
from bagua.engine.bucket import Bucket
from bagua.engine.bucket_readiness import BucketReadiness, flag_setter
from bagua.engine.comm_thread import CommThread, has_thread, join_thread
from bagua.engine.step_state import BucketEvent, BucketState
from bagua.engine.step_statistics import PassRecorder
from bagua.job.failure_report import failures_named
from bagua.job.nccl_watch import watch
from bagua.job.regrouped import Regrouped

# A launched bucket, what waits for it, and whether its results are where they are wanted then.
_Started = tuple[Bucket, Callable[[], object], bool]


class CommScheduler:
    """Of one plan of a module. The record of each tensor has what sets its ready flag.

    Args:
        buckets: in launch order, the same on all ranks. None: nothing is communicated.
        group: whose stream carries the operations.
        sees_flags: ready flags are set here. False: buckets are launched by `launch_buckets` alone.
        join_helps: for errors: ranks with fewer batches than others can take part by `join`.

    Attributes:
        sent: the buckets of the pass that was waited for last.
        has_begun: a ready flag was set or a bucket launched since the last `end_step`.
        is_whole: the launch set of this step has all buckets.

    Raises:
        ValueError: a tensor, or its name, is in two buckets.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: BaguaProcessGroup,
        recorder: PassRecorder | None = None,
        *,
        sees_flags: bool = True,
        join_helps: bool = False,
    ) -> None:
        _check_distinct(buckets)
        self._what = _contents(buckets)
        # Of the end of a pass.
        self._failures: failures_named | None = None
        self._join_helps = join_helps
        self._group = group
        self._recorder = recorder or PassRecorder()
        self._states = [BucketReadiness(bucket) for bucket in buckets]
        self._queue = deque(self._states)
        self.is_whole = True
        self._started: list[_Started] = []
        self.sent: list[Bucket] = []
        self.has_begun = False
        # Guards all below, and the states of the buckets but for their ready flags.
        self.lock = threading.RLock()
        self._thread: CommThread | None = None
        self._leave_thread: Callable[[], object] | None = None
        # Tells the watch over NCCL that a pass was queued.
        self._has_passed = watch(group) if any(bucket.is_on_gpu for bucket in buckets) else None
        self._setters: list[tuple[TensorRecord, Callable[[object], None]]] = [
            (record, flag_setter(state, index, self))
            for state in self._states
            for index, record in enumerate(state.bucket.records)
        ]
        if sees_flags:
            self.register()

    @property
    def what(self) -> str:
        """Is communicated, for errors and logs; the same on all ranks. May be set."""
        return self._what

    @what.setter
    def what(self, what: str) -> None:
        if what != self._what:
            self._what, self._failures = what, None

    @property
    def recorder(self) -> PassRecorder:
        """What takes the times."""
        return self._recorder

    def register(self) -> None:
        """From now on a tensor's record sets its flag here."""
        for record, set_flag in self._setters:
            record.set_ready = set_flag

    def unregister(self) -> None:
        """Records set no flags here any more."""
        for record, set_flag in self._setters:
            if record.set_ready is set_flag:
                record.set_ready = None

    def names_of_replaced(self) -> list[str]:
        """Of tensors that are not what they were when their buckets were made, hooks included. Converting a module does
        that to its parameters with torch.__future__.set_swap_module_params_on_conversion."""
        return [
            record.name
            for state in self._states
            for tensor, record in zip(state.bucket.tensors, state.bucket.records, strict=True)
            if record_of(tensor) is not record
        ]

    # --- ready flags and launches ------------------------------------------------------------------------------------

    def choose_buckets(self, buckets: Iterable[Bucket]) -> None:
        """The launch set of this step: these buckets alone are communicated until it ends, in their usual order. All
        ranks choose the same, before the step has set a ready flag or launched a bucket.

        Raises:
            RuntimeError: the step has begun to communicate.
        """
        chosen = {id(bucket) for bucket in buckets}
        with self.lock:
            if self.has_begun:
                raise RuntimeError("choose_buckets: this step has begun to communicate; choose at its beginning")
            self._choose_all()
            self.is_whole = chosen.issuperset(id(state.bucket) for state in self._states)
            self._queue = deque(state for state in self._states if id(state.bucket) in chosen)
            for state in self._states:
                if id(state.bucket) not in chosen:
                    state.leave_out()

    def launch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Start the operations of these buckets now, with the tensors as the current stream has left them. They are the
        launch set of this step. Every rank does so."""
        with self.lock:
            if {id(bucket) for bucket in buckets} != {id(state.bucket) for state in self._queue}:
                self.choose_buckets(buckets)
            self.has_begun = True
            for state in self._queue:
                state.set_all_flags()
            self.launch_complete()

    def hold(self) -> None:
        """A pass begins whose buckets are launched at its end."""
        with self.lock:
            for state in self._states:
                state.state = BucketEvent.DEFERRED[state.state]

    def keep_unsent(self, keeps_all: bool) -> None:
        """Of buckets that were not launched, keep gradients as if they were (`bucket.local`).

        Args:
            keeps_all: those without ready flag, too.
        """
        with self.lock:
            for state in self._states:
                if state.bucket.local is not None and state.state in (BucketState.WAITING, BucketState.HELD):
                    pairs = zip(state.bucket.tensors, state.ready, strict=True)
                    state.bucket.local.keep([one for one, is_ready in pairs if is_ready or keeps_all])

    def launch_complete(self, pass_is_over: bool = False) -> None:
        """The last ready flag of a bucket was set: launch it and those behind it, as far as they are complete."""
        with self.lock:
            while self._queue and 0 not in self._queue[0].ready and self._queue[0].may_launch(pass_is_over):
                self._launch(self._queue[0])

    def _launch(self, state: BucketReadiness) -> None:
        self._queue.rotate(-1)
        streams = state.other_streams() if state.current_stream is not None else ()
        state.clear_flags()
        state.state = BucketEvent.LAUNCH[state.state]
        bucket = state.bucket
        if not self._started:
            self._recorder.begin_pass(bucket)
        is_sampling = self._recorder.is_sampling
        if is_sampling:
            self._recorder.launched(bucket)
        # The backend's first call makes connections, and waits for the other ranks; no later one does. What the group's
        # thread runs may wait: it is told here that what fails is named by others.
        what = "starting to communicate "
        if not (self.sent and (bucket.is_on_gpu or bucket.inline_op is not None)):
            with failures_named(self._group, what + self._what, join_helps=self._join_helps):
                self._started.append(self._start(bucket, streams, is_sampling))
            return
        try:
            self._started.append(self._start(bucket, streams, is_sampling))
        except Exception as error:
            communicator = self._group.get_global_communicator()
            communicator.name_failure(error, what + self._what, join_helps=self._join_helps)
            raise

    def _start(self, bucket: Bucket, streams: Sequence[torch.cuda.Stream], is_sampling: bool) -> _Started:
        if streams:
            _wait_for(streams, bucket)
        if bucket.local is not None:
            bucket.local.keep(bucket.tensors)
        inline_op, is_on_gpu = bucket.inline_op, bucket.is_on_gpu
        if is_on_gpu and (is_sampling or inline_op is None):
            return self._start_on_stream(bucket)
        bucket.copy_in()
        # Once there is a thread, all that is on CPU goes there: it may still have to start operations that come before
        # this one. What is on a GPU has another order, and what its streams wait for is known on this thread alone.
        if inline_op is not None and (is_on_gpu or not has_thread(self._group)):
            work = inline_op.run(bucket)
            return bucket, _nothing if work is None else work.wait, bucket.flatten
        if self._thread is None:
            self._thread = join_thread(self._group)
            self._leave_thread = weakref.finalize(self, self._thread.leave)
        run = self._recorder.timed(bucket, bucket.run_ops) if is_sampling else bucket.run_ops
        return bucket, self._thread.submit(run).result, bucket.flatten

    def _start_on_stream(self, bucket: Bucket) -> _Started:
        stream = self._group.stream_on(bucket.device)
        bucket.copy_in()
        # Whoever drops the module while operations are under way must not let others have its memory.
        bucket.keep_for(stream)
        current = torch.cuda.current_stream(bucket.device)
        stream.wait_stream(current)
        is_sampling = self._recorder.is_sampling
        begin = stream.record_event(torch.cuda.Event(enable_timing=True)) if is_sampling else None  # type: ignore[no-untyped-call]
        try:
            with on_stream(stream):
                bucket.run_ops()
                bucket.copy_out()
                event = torch.cuda.Event(enable_timing=is_sampling)  # type: ignore[no-untyped-call]
                event.record(stream)
        except BaseException as error:
            current.wait_stream(stream)  # some operations may be under way, and nobody waits for them any more
            if isinstance(error, Regrouped):
                # The pass comes to its end, as the others' does.
                return bucket, functools.partial(_fail, error), False
            raise
        if begin is not None:
            self._recorder.queued(bucket, begin, event)
        return bucket, functools.partial(_wait_for_event, bucket.device, event), True

    # --- the end of a pass -------------------------------------------------------------------------------------------

    def wait_pending_comm_ops(self) -> None:
        """Results of all launched buckets are in place for what follows: on CPU on return, with CUDA on the current
        stream. The next pass may begin.

        Raises:
            RuntimeError: communication failed; names the ranks that are gone, where that can be found out.
        """
        for bucket, _, is_in_place in self._end_pass():
            if not is_in_place:
                bucket.copy_out()

    def abandon_pass(self) -> None:
        """As `wait_pending_comm_ops`, of a pass that raised: its results are of no use. They must not come back as
        gradients, which may have been zeroed since."""
        self._end_pass()

    def drop_pass(self) -> None:
        """What was launched has failed, or will: forget it, and all ready flags. Raises nothing."""
        with self.lock:
            started, self._started = self._started, []
        for _, wait, _ in started:
            with contextlib.suppress(Exception):
                wait()
        self.sent = []
        self.reset()

    def _end_pass(self) -> list[_Started]:
        """What was launched, and is over."""
        with self.lock:
            if len(self._started) < len(self._states):
                self.launch_complete(pass_is_over=True)
            started, self._started = self._started, []
            for state in self._states:
                if state.state is BucketState.LAUNCHED:
                    state.state = BucketEvent.WAITED_FOR[state.state]
                if 1 in state.ready and not state.is_left_out:
                    state.state = BucketEvent.LEFT_PARTLY[state.state]
                    state.bucket.unscale()
            self.sent = [bucket for bucket, _, _ in started]
        if self._has_passed is not None:
            self._has_passed()
        if started:
            last = self.sent[-1]
            is_sampling = self._recorder.is_sampling
            gradients_done = _timed_event(last.device) if last.is_on_gpu and is_sampling else None
            begin = time.perf_counter()
            if self._failures is None:
                what = f"waiting for {self._what}"
                self._failures = failures_named(self._group, what, in_order=True, join_helps=self._join_helps)
            with self._failures:
                for bucket, wait, _ in started:
                    wait()
                    if is_sampling:
                        self._recorder.is_over(bucket)
            self._recorder.end_pass(None if last.is_on_gpu else time.perf_counter() - begin, gradients_done)
        return started

    @property
    def holds_back(self) -> bool:
        """Whether a bucket has gradients of some of its tensors, and waits for others."""
        return any(state.is_flagged for state in self._states)

    def end_step(self) -> list[str]:
        """Names of the tensors of the launch set that were not communicated while others were, since the last call. A
        complete step, or none at all, gives an empty list. The next step communicates all buckets."""
        with self.lock:
            names = self._missing()
            if self.has_begun:
                for state in self._states:
                    if state.state is BucketState.SENT:
                        state.state = BucketEvent.STEP_ENDS[state.state]
                # What outlives the step: an exchange of weights, and what makes the step incomplete.
                self.has_begun = bool(self._started or names)
            if not self.is_whole:
                self._choose_all()
            return names

    def _choose_all(self) -> None:
        self.is_whole, self._queue = True, deque(self._states)
        for state in self._states:
            if state.is_left_out:
                state.clear_flags()

    def _missing(self) -> list[str]:
        if not self.has_begun:
            return []
        for state in self._states:
            if state.state is not BucketState.SENT or 1 in state.ready:
                break
        else:
            return []
        # Of an earlier pass, but not reached again in front of one that was: that one's gradients were not sent.
        blocking: set[BucketReadiness] = set()
        is_blocking = False
        for state in reversed(self._queue):
            if is_blocking:
                blocking.add(state)
            is_blocking |= state.is_flagged
        return [
            name
            for state in self._states
            if state.is_flagged or state.state in (BucketState.WAITING, BucketState.HELD) or state in blocking
            for name in state.unready_names()
        ]

    def continue_step_of(self, other: CommScheduler) -> None:
        """Go on in the step of a scheduler that this one replaces, if it is incomplete: gradients that were made, and
        not sent, are taken as they are, and what is missing is still missing. What it has launched was waited for."""
        if not other._missing():
            return
        self.has_begun = True
        made: set[int] = set()
        sent: set[int] = set()
        for state in other._states:
            for tensor, flag in zip(state.bucket.tensors, state.ready, strict=True):
                if flag and not state.is_left_out:
                    made.add(id(tensor))
                elif flag or state.state is BucketState.SENT:
                    sent.add(id(tensor))
        for state in self._states:
            state.take_over_flags(made, sent)

    def reset(self) -> None:
        """Forget all ready flags and restore the order: after an error, before re-initialization. What was launched was
        waited for."""
        with self.lock:
            self.is_whole, self._queue, self.has_begun = True, deque(self._states), False
            for state in self._states:
                state.reset()

    def close(self) -> None:
        """Leave tensors and thread alone from now on. The memory of the buckets is free as soon as nobody has it, also
        without Python's collector."""
        self.unregister()
        if self._leave_thread is not None:
            self._leave_thread()
            self._thread = self._leave_thread = None
        self._setters = []  # which refer to it


def _nothing() -> None:
    """To wait for."""


def _wait_for_event(device: torch.device, event: torch.cuda.Event) -> None:
    torch.cuda.current_stream(device).wait_event(event)


def _fail(error: Regrouped) -> None:
    raise error


def _timed_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _wait_for(streams: Sequence[torch.cuda.Stream], bucket: Bucket) -> None:
    """The current stream waits for those on which flags were set, see the note in bagua.engine.bucket_readiness."""
    current = torch.cuda.current_stream(bucket.device)
    for stream in streams:
        current.wait_stream(stream)
    bucket.keep_gradients_for(current)


def _contents(buckets: Sequence[Bucket]) -> str:
    if all(bucket.holds_gradients for bucket in buckets):
        return "the gradients of a backward pass"
    weights = all(
        isinstance(tensor, torch.nn.Parameter) and record.getter is None
        for bucket in buckets
        for tensor, record in zip(bucket.tensors, bucket.records, strict=True)
    )
    return "exchanged weights" if weights else "the results of a backward pass"


def _check_distinct(buckets: Sequence[Bucket]) -> None:
    names: dict[str, str] = {}
    proxies: dict[int, str] = {}
    for bucket in buckets:
        for tensor, record in zip(bucket.tensors, bucket.records, strict=True):
            other = names.get(record.name) or proxies.get(id(tensor))
            if other is not None:
                raise ValueError(f"tensor {record.name!r} of bucket {bucket.name!r} is already in bucket {other!r}")
            names[record.name] = proxies[id(tensor)] = bucket.name
