"""Names the ranks that are gone when NCCL loses one. Owns one daemon thread of the process.

NCCL's collectives raise nothing: their kernels wait on the GPU. torch's watchdog learns from NCCL that a peer is gone,
and ends the process, but collects first what it knows, which takes seconds to minutes. In the meantime this thread asks
the backend whether it has failed, and prints which ranks are gone. It calls nothing of CUDA: it would break the capture
of a CUDA graph.

Only neighbors of the dead rank learn of it; the others have to answer when they ask who is there. A rank whose passes
follow each other does not listen. One that has begun none for QUIET_S may wait for its GPU, and does.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from bagua.job import gloo_exit, torch_internals
from bagua.job.failure_report import explain_failure
from bagua.job.job_thread import is_watch_left_to_others, waiting_for
from bagua.job.waiting import Members

LOOK_S = 0.25
QUIET_S = 2.0
STOP_S = 1.0
_WHAT = "communicating on GPUs"


class Group(Members, Protocol):
    @property
    def is_alive(self) -> bool:
        """Whether torch has not destroyed it."""

    @property
    def torch_groups(self) -> Sequence[dist.ProcessGroup]:
        """That carry its collectives; none after `abort`."""


class _Watched:
    def __init__(self, group: Group) -> None:
        self._waiting = waiting_for(group.ranks, _WHAT)
        if self._waiting is not None:
            self._waiting.__enter__()
            weakref.finalize(group, self.leave)
        self.has_passed()

    def has_passed(self) -> None:
        if self._waiting is not None:
            self._waiting.since = time.monotonic() + QUIET_S

    def leave(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.__exit__()


class _Watch:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # not held while something is asked or waited for
        self._all: weakref.WeakKeyDictionary[Group, _Watched] = weakref.WeakKeyDictionary()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua-nccl-watch", daemon=True)
        self._thread.start()

    def add(self, group: Group) -> Callable[[], None]:
        with self._lock:
            if group not in self._all:
                self._all[group] = _Watched(group)
            return self._all[group].has_passed

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                everything = list(self._all.items())
            for group, watched in everything:
                if not group.is_alive:
                    watched.leave()
                    with self._lock:
                        del self._all[group]
                elif (error := _error_of(group)) is not None:
                    explain_failure(error, group, _WHAT)  # which prints it
                    return
            del everything  # it would keep the groups


def _error_of(group: Group) -> RuntimeError | None:
    with contextlib.suppress(RuntimeError):  # it is destroyed right now
        return next(filter(None, map(torch_internals.backend_error, group.torch_groups)), None)
    return None


_the_watch: _Watch | None = None
_creation = threading.Lock()


def watch(group: Group) -> Callable[[], None]:
    """
    From now on, until the group is gone.

    Returns:
        what to call whenever the communication of a pass was queued.
    """
    global _the_watch
    # Errors reach Python, or another watch.
    if torch_internals.is_nccl_waited_for() or is_watch_left_to_others():
        return lambda: None
    with _creation:
        if _the_watch is None:
            _the_watch = _Watch()
        return _the_watch.add(group)


@gloo_exit.before_pause
def stop_watch() -> None:
    # A thread that asks a backend while the interpreter is taken down can end the process with a signal.
    if _the_watch is not None:
        _the_watch.stop()
