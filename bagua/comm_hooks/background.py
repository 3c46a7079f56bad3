"""Runs the communication of DDP's buckets beside the backward pass, each bucket's as one function, in order.

One `Background` per torch group and kind of device, made at the first bucket and kept as long as the torch group lives;
all hooks on the group share it. `run` is called by autograd's thread, in the order of the buckets, which DDP keeps the
same on all ranks.

With CUDA the function runs at once, on that thread, and queues its work on the group's stream, which waits for the
gradients; the host waits for nothing. On CPU the function blocks, so a thread of its own runs it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from bagua.collectives.member_group import create_member_group
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.engine.failure_report import failures_named

Work = Callable[[], Tensor]

_WHAT = "the communication of a DDP bucket"
_STOP_S = 5.0


class Background(ABC):
    """
    Attributes:
        group: that the functions communicate in.
    """

    def __init__(self, group: BaguaProcessGroup) -> None:
        self.group = group

    @abstractmethod
    def run(self, work: Work, device: torch.device) -> Future[Tensor]:
        """Start `work`; the future has its result, in place for whoever waits. What it raises comes out of the backward
        pass."""


class StreamBackground(Background):
    """The group's CUDA stream."""

    def run(self, work: Work, device: torch.device) -> Future[Tensor]:
        stream = self.group.stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream(device))
        # A future with devices notes, on the stream that is current as it gets its result, what to wait for.
        future: Future[Tensor] = Future(devices=[device])
        with failures_named(self.group, _WHAT), torch.cuda.stream(stream):
            future.set_result(work())
        return future


class ThreadBackground(Background):
    """A thread, and a group of its own: DDP's own collectives are started by autograd's thread meanwhile, and those of
    one group must have one order."""

    def __init__(self, group: BaguaProcessGroup) -> None:
        ranks = sorted(group.ranks)
        with failures_named(group, "making the group of a communication hook"):
            torch_group = create_member_group(ranks, group.timeout)
        super().__init__(BaguaProcessGroup(torch_group, ranks, timeout=group.timeout))
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, self.group), name="bagua-comm-hook", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._jobs, self._thread)

    def run(self, work: Work, device: torch.device) -> Future[Tensor]:
        done: Future[Tensor | Exception] = Future()
        # Only what a callback raises is an error for C++ too; `set_exception` is known to Python alone.
        result: Future[Tensor] = done.then(_result)
        self._jobs.put((work, done))
        return result


_Jobs = queue.SimpleQueue[tuple[Work, Future[Tensor | Exception]] | None]


def _serve(jobs: _Jobs, group: BaguaProcessGroup) -> None:
    """After a failure the rest fails likewise: the peers would not understand messages that come out of order."""
    failure: Exception | None = None
    while (job := jobs.get()) is not None:
        work, done = job
        outcome: Tensor | Exception
        try:
            if failure is not None:
                raise failure
            with failures_named(group, _WHAT):
                outcome = work()
        except Exception as error:
            outcome = failure = error
        done.set_result(outcome)
        # Not kept until the next job, which may never come: they refer to the owner of this thread.
        del job, work, done, outcome


def _result(done: Future[Tensor | Exception]) -> Tensor:
    outcome = done.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _stop(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(None)
    if threading.current_thread() is not thread:
        thread.join(timeout=_STOP_S)


# By torch group, which the values do not hold, and kind of device.
_backgrounds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Background]] = weakref.WeakKeyDictionary()


def background_of(group: BaguaProcessGroup, device: torch.device) -> Background:
    """Where hooks on `group` communicate tensors of such a device. On CPU the first call is collective."""
    torch_group = group.torch_group
    if torch_group is None:
        raise ValueError(
            f"this rank is no member of the process group (ranks {group.ranks}) that the communication hook was given;"
            " give the hook the group that DistributedDataParallel was made with"
        )
    by_device = _backgrounds.setdefault(torch_group, {})
    if device.type not in by_device:
        by_device[device.type] = StreamBackground(group) if device.type == "cuda" else ThreadBackground(group)
    return by_device[device.type]
