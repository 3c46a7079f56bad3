"""The thread that runs operations on CPU: one for each process group, shared by all modules that train over it.

A group's collectives must start in one order, the same on all ranks. Two threads would start them in an order that is
up to the kernel, so that one rank's broadcast meets another's all-reduce. The thread begins with the first operation
that needs it and ends with the last scheduler that used it.

So everything that Bagua itself says in the group during a backward pass goes there, too (`in_order`). What users say in
it, by torch.distributed, does not: Bagua's own operations therefore have groups of their own on CPUs.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.job import gloo_exit, torch_internals
from bagua.job.failure_report import CollectiveError, is_communication_error, is_named_around, set_named_around
from bagua.job.regrouped import Regrouped
from bagua.kernels.scratch_memory import keep_scratch

_Job = tuple[Callable[[], Any], Future[Any], bool]  # whether the submitter names what fails, and collectives need not

# How long the last user waits for the thread's end, and a process that ends, without a word. As a rule the queue is
# empty, or has an exchange of weights, which takes less than a step.
_JOIN_SECONDS = 5.0

_logger = logging.getLogger("bagua")

# Guards the table and the users of its threads. Reentrant: garbage collection may call `leave` anywhere.
_lock = threading.RLock()
_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, CommThread] = weakref.WeakKeyDictionary()


class EarlierFailureError(RuntimeError):
    """Nothing was communicated, for what should have been before has failed. That is the cause."""


class CommThread:
    """Runs jobs in the order in which they were submitted. After a failure the rest fails, too: the peers would not
    understand operations that come out of order."""

    def __init__(self) -> None:
        self._users = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="bagua-comm", daemon=True)

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Any thread. The future has the job's result or exception. If one failed before it, it has the exception of
        that, in communication, or else an EarlierFailureError."""
        future: Future[Any] = Future()
        self._jobs.put((job, future, is_named_around()))
        return future

    def leave(self) -> None:
        """One user less; with the last one the thread ends, after what was submitted."""
        with _lock:
            self._users -= 1
            if self._users:
                return
            for group, thread in list(_threads.items()):
                if thread is self:
                    del _threads[group]
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_JOIN_SECONDS)


@gloo_exit.before_pause
def _end_threads() -> None:
    """At the end of the process, after what was submitted: users that are left call `leave` later, or never. On a slow
    network the others may still need it; it fails if they are gone, or have not come within the group's timeout."""
    with _lock:
        threads = list(_threads.items())
        _threads.clear()
    for _, thread in threads:
        thread._jobs.put(None)
    for group, thread in threads:
        thread._thread.join(_JOIN_SECONDS)
        if thread._thread.is_alive() and not gloo_exit.is_failing():
            _logger.warning("this process has reached its end, and waits for its last communication with other ranks")
            timeout = torch_internals.backend_timeout(group)
            thread._thread.join(None if timeout is None else timeout.total_seconds())


def in_order(group: dist.ProcessGroup, device: torch.device, job: Callable[[], Any]) -> Any:
    """The result of `job`, a collective of `group` that is called while operations of buckets may be under way: by the
    group's thread, after what was submitted before it, or here and now if there is no such thread, or the tensors are
    on a GPU."""
    with _lock:
        thread = _threads.get(group) if device.type == "cpu" else None
        if thread is not None and thread._thread is threading.current_thread():
            thread = None
        if thread is not None:
            thread._users += 1
    if thread is None:
        return job()
    try:
        return thread.submit(job).result()
    finally:
        thread.leave()


def has_thread(group: BaguaProcessGroup) -> bool:
    """Whether somebody uses the group's thread now."""
    return bool(_threads) and group.torch_group in _threads


def join_thread(group: BaguaProcessGroup) -> CommThread:
    """The group's thread with one more user, who calls `leave` once."""
    assert group.torch_group is not None, "members only"
    with _lock:
        thread = _threads.get(group.torch_group)
        is_new = thread is None
        if thread is None:
            thread = _threads[group.torch_group] = CommThread()
        thread._users += 1
    if is_new:
        # Without the lock: `start` waits for the new thread, which may collect garbage first and so call `leave`.
        try:
            thread._thread.start()
        except BaseException:  # no more threads: the next one tries again
            with _lock:
                _threads.pop(group.torch_group, None)
            raise
    return thread


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    failure: BaseException | None = None
    memory = keep_scratch()
    while (entry := jobs.get()) is not None:
        job, future, is_named = entry
        result = None
        if failure is None:
            set_named_around(is_named)
            try:
                result = job()
            except BaseException as error:  # whoever waits for the future raises it
                failure = error
            memory.clear()
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(result)
        else:
            future.set_exception(_later(failure))
        del entry, job, future, result  # they hold the bucket while the queue is empty


def _later(failure: BaseException) -> BaseException:
    if is_communication_error(failure) or isinstance(failure, CollectiveError | Regrouped):
        return failure  # whoever waits has its own explanation made
    error = EarlierFailureError(
        "not communicated: an operation of this or another module of the group has failed before"
        f" ({type(failure).__name__}: {failure}), and since then this rank may be out of step with the others. Mend"
        " that, and start all ranks again"
    )
    error.__cause__ = failure
    return error
