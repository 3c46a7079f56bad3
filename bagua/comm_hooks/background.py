"""Runs the communication of DDP's buckets beside the backward pass, each bucket's as one function, in order.

One `Background` per torch group and kind of device, made at the first bucket and kept as long as the torch group lives;
all hooks on the group share it. `run` is called by autograd's thread, in the order of the buckets, which DDP keeps the
same on all ranks.

With CUDA the function runs at once, on that thread, and queues its work on the group's stream, which waits for the
gradients; the host waits for nothing. On CPU the function blocks, so a communication thread runs it.
"""

from __future__ import annotations

import concurrent.futures
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from bagua.collectives.carrier_device import on_stream
from bagua.collectives.process_group import BaguaProcessGroup, duplicate_group
from bagua.engine.comm_thread import join_thread
from bagua.job.failure_report import failures_named

Work = Callable[[], Tensor]

_Finished = concurrent.futures.Future[Tensor]

_WHAT = "the communication of a DDP bucket"


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
        stream = self.group.stream_on(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        # A future with devices notes, on the stream that is current as it gets its result, what to wait for.
        future: Future[Tensor] = Future(devices=[device])
        try:
            with failures_named(self.group, _WHAT), on_stream(stream):
                future.set_result(work())
        except BaseException:
            current.wait_stream(stream)  # a part may be under way, and nobody waits for it any more
            raise
        return future


class ThreadBackground(Background):
    """The communication thread of a group of its own: DDP's own collectives are started by autograd's thread meanwhile,
    and those of one group must have one order."""

    def __init__(self, group: BaguaProcessGroup) -> None:
        with failures_named(group, "making the group of a communication hook"):
            super().__init__(duplicate_group(group))
        self._thread = join_thread(self.group)
        weakref.finalize(self, self._thread.leave)

    def run(self, work: Work, device: torch.device) -> Future[Tensor]:
        group = self.group
        done: Future[_Finished] = Future()
        # Only what a callback raises is an error for C++ too; `set_exception` is known to Python alone.
        result: Future[Tensor] = done.then(_result)

        def communicate() -> Tensor:
            with failures_named(group, _WHAT):
                return work()

        self._thread.submit(communicate).add_done_callback(done.set_result)
        return result


def _result(done: Future[_Finished]) -> Tensor:
    return done.value().result()


# By torch group, which the values do not hold, and kind of device.
_backgrounds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Background]] = weakref.WeakKeyDictionary()


def background_of(group: BaguaProcessGroup, device: torch.device) -> Background:
    """Where hooks on `group` communicate tensors of such a device. On CPU the first call is collective."""
    torch_group = group.torch_group
    if torch_group is None:
        raise ValueError(
            f"This rank is not a member of the process group of the communication hook (ranks {group.ranks}).\n"
            "Pass the hook the group that DistributedDataParallel was made with."
        )
    by_device = _backgrounds.setdefault(torch_group, {})
    if device.type not in by_device:
        by_device[device.type] = StreamBackground(group) if device.type == "cuda" else ThreadBackground(group)
    return by_device[device.type]
