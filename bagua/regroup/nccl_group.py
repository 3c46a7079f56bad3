"""NCCL's communicator of an epoch, in this process: how a thread leaves it, and who notices that it has failed.

[Note: what ends a wait for a GPU] NCCL's collectives are kernels, which wait on the GPU for other ranks, for as long as
it takes. A thread that waits for the GPU, in whatever call, waits for them. They end when the communicator is aborted,
which any other thread can do (`NcclGroup.leave`): then all calls return, and what the kernels had to write is garbage.
So nothing here looks at a clock while it waits for a GPU. Whoever waits looks, when that is over, whether the
communicator was left meanwhile (`raise_if_left`): it is marked as such before it is aborted.

Who leaves it: the thread that is told of a loss, or the watch (`NcclWatch`), a thread of the process. The watch finds
what nobody is told of: a failed network, a rank that has left the job in an orderly way before a collective that this
one is in, and a collective that is not over within the user's timeout.

[Note: queued while it is aborted] An abort frees what kernels use that are queued meanwhile: CUDA reports an illegal
memory access then, and the process is of no use any more. So one lock is held for both. And whoever queues must not
wait for the GPU: with about a thousand kernels in its queue, CUDA lets the caller wait, within NCCL's own lock, and the
abort waits for that. So no more than MAX_QUEUED collectives are under way; who queues more waits without a lock. The
host may still wait there for a lost rank, to which NCCL makes a connection: then the lock is not waited for.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua.job import torch_internals
from bagua.regroup.epochs import Epoch

MAX_QUEUED = 256
QUEUE_S = 1.0
PAUSE_S = 0.0005  # between two looks, for room in the queue
LOOK_S = 0.1  # of the watch
ASK_S = 0.5  # a collective that takes longer is a reason to ask whether a rank has left
STOP_S = 1.0
TIMED_OUT = "timed out"  # in the text of an error, as in gloo's

_logger = logging.getLogger("bagua")


class _Queued(NamedTuple):
    """A collective under way."""

    number: int
    begin: float
    work: dist.Work


class NcclGroup:
    """
    Args:
        backend: NCCL's of torch. Its communicator may still be on its way.
    """

    def __init__(self, backend: Any, device: torch.device, timeout: datetime.timedelta) -> None:
        self.backend, self.device, self._timeout = backend, device, timeout
        self._queueing = threading.Lock()
        self._leaving = threading.Lock()
        self._why: str | None = None  # it was left, or will be
        self._is_left = False
        self._count = 0  # of what was queued
        self._under_way: deque[_Queued] = deque()
        self._pass: torch.cuda.Event | None = None
        self._pass_end = 0  # number of the last collective of a pass that was not waited for yet; 0: there is none

    # --- collectives, on any thread ----------------------------------------------------------------------------------

    def queue(self, operation: Callable[..., dist.Work], *arguments: Any, **named: Any) -> dist.Work:
        """
        Calls one of the backend's operations.

        Raises:
            DistBackendError: it was left.
        """
        while len(self._under_way) >= MAX_QUEUED:
            self.raise_if_left()
            self._forget_done()
            if len(self._under_way) >= MAX_QUEUED:
                time.sleep(PAUSE_S)
        with self._queueing:
            self.raise_if_left()
            work = operation(*arguments, **named)
            self._count += 1
            self._under_way.append(_Queued(self._count, time.monotonic(), work))
        return work

    def wait(self) -> None:
        """Until what is queued on the current stream is done.

        Raises:
            DistBackendError: it was left before.
        """
        last = self._count
        self._synchronize_stream()
        self.raise_if_left()
        self._forget(last)

    def note_pass(self) -> None:
        """The current stream waits for all collectives of a backward pass."""
        self._pass = self._recorded()
        self._pass_end = self._count

    def wait_for_pass(self) -> None:
        """Until the collectives of the last backward pass are done.

        Raises:
            DistBackendError: it was left before.
        """
        last, self._pass_end = self._pass_end, 0
        if last:
            assert self._pass is not None
            self._pass.synchronize()
            self.raise_if_left()
            self._forget(last)

    def raise_if_left(self) -> None:
        """
        Raises:
            DistBackendError: says why.
        """
        if self._why is not None:
            raise dist.DistBackendError(f"NCCL's collectives were ended: {self._why}.")

    def _forget(self, last: int) -> None:
        """All up to this number are done: NCCL keeps their order."""
        with self._queueing:
            while self._under_way and self._under_way[0].number <= last:
                self._under_way.popleft()

    def _forget_done(self) -> None:
        """Of which nobody has said so. An error counts as done: the watch looks for that first."""
        with self._queueing:
            while self._under_way and self._under_way[0].work.is_completed():
                self._under_way.popleft()

    @property
    def queued(self) -> int:
        """How many collectives this process has queued. All ranks queue the same ones."""
        return self._count

    def is_waiting(self) -> bool:
        """Whether a collective may be under way for longer than ASK_S. Asks nothing of CUDA."""
        return self._takes_longer_than(ASK_S)

    # --- its end -----------------------------------------------------------------------------------------------------

    @property
    def is_left(self) -> bool:
        return self._is_left

    def leave(self, why: str) -> None:
        """What was queued ends, and nothing more is queued. Any thread; again is harmless."""
        self._why = self._why or why
        with self._leaving:
            if self._is_left:
                return
            has_lock = self._queueing.acquire(timeout=QUEUE_S)
            try:
                torch_internals.abort_backend(self.backend)
            except RuntimeError as error:  # of what was wrong before; there is no more to be done
                _logger.warning(f"Aborting NCCL's communicator has failed: {str(error).splitlines()[0][:200]}")
            finally:
                self._is_left = True
                if has_lock:
                    self._queueing.release()

    def come_to_rest(self) -> None:
        """After `leave`: until the GPU has nothing to do any more that was queued before."""
        self._pass_end = 0
        self._under_way.clear()
        self._synchronize_device()

    # --- what is asked of CUDA, but for the collectives --------------------------------------------------------------

    def _synchronize_stream(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def _synchronize_device(self) -> None:
        torch.cuda.synchronize(self.device)

    def _recorded(self) -> torch.cuda.Event:
        """An event of the current stream."""
        event = self._pass or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    # --- the watch ---------------------------------------------------------------------------------------------------

    def problem(self) -> str | None:
        """Why it has to be left, if it has. By the watch. Asks nothing of CUDA before the timeout: it would break the
        capture of a CUDA graph."""
        if self._why is not None or not self._under_way:
            return None
        error = torch_internals.nccl_error(self.backend)
        if error is not None:
            return error
        limit = self._timeout.total_seconds()
        if self._takes_longer_than(limit):
            self._forget_done()
            if self._takes_longer_than(limit):
                return f"a collective {TIMED_OUT} after {limit:g} s"
        return None

    def _takes_longer_than(self, seconds: float) -> bool:
        with self._queueing:
            begin = self._under_way[0].begin if self._under_way else None
        return begin is not None and time.monotonic() - begin > seconds


class NcclWatch:
    """Looks after the communicator of the present epoch. Owns a daemon thread.

    Args:
        on_problem: called with an epoch, and what is wrong with its communicator.
        why_waiting: asked with an epoch, and how many collectives were queued, while one takes long: whether a rank
            that has left will never be in them.
    """

    def __init__(
        self, on_problem: Callable[[Epoch, str], None], why_waiting: Callable[[Epoch, int], str | None]
    ) -> None:
        self._on_problem, self._why_waiting = on_problem, why_waiting
        self._watched: tuple[weakref.ref[NcclGroup], Epoch] | None = None
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua-regroup-nccl", daemon=True)
        self._thread.start()

    def follow(self, group: NcclGroup, epoch: Epoch) -> None:
        """Look after the one of this epoch from now on."""
        self._watched = weakref.ref(group), epoch

    def stop(self) -> None:
        self._is_stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._is_stopped.wait(LOOK_S):
            if self._watched is None:
                continue
            reference, epoch = self._watched
            group, problem = reference(), None
            if group is None:
                continue
            queued, is_waiting = group.queued, group.is_waiting()
            with contextlib.suppress(RuntimeError):  # it is aborted right now
                problem = group.problem()
            del group
            if problem is None and is_waiting:
                problem = self._why_waiting(epoch, queued)
            if problem is not None:
                self._on_problem(epoch, problem)


class _Mode(threading.local):
    is_waited_for: bool | None = None


_mode = _Mode()


class results_deferred:  # noqa: N801 - a context manager, as contextlib's
    """Around collectives on GPUs, on this thread, whose results nobody relies on before `NcclGroup.wait_for_pass`.

    Args:
        defers: False: their results are relied on at once, also in a backward pass.
    """

    def __init__(self, defers: bool = True) -> None:
        self._defers = defers

    def __enter__(self) -> None:
        self._before, _mode.is_waited_for = _mode.is_waited_for, not self._defers

    def __exit__(self, *_: object) -> None:
        _mode.is_waited_for = self._before


def is_waited_for() -> bool:
    """Whether the host has to wait for a collective on GPUs that this thread waits for. Not in a backward pass."""
    mode = _mode.is_waited_for
    return not torch_internals.is_in_backward() if mode is None else mode
