"""NCCL under regroup as it looks from the host, without GPUs; for use inside a rank (support.ranks).

Collectives are queued, and done in their order by a thread, with gloo. The host goes on at once, as with a GPU. A
collective never raises: it waits for a rank that is gone until the communicator is aborted, and leaves garbage then. As
with sockets, the backend of a neighbor says that it has an error, or, as with P2P and shared memory, it says nothing.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from bagua.collectives import initialization
from bagua.comm_ops import public_bucket
from bagua.job import torch_internals
from bagua.regroup import groups, watched_group
from bagua.regroup.nccl_group import NcclGroup

GARBAGE = 77
SIMULATED = "BAGUA_TEST_SIMULATED_NCCL"  # SOCKETS or P2P
SOCKETS, P2P = "sockets", "p2p"


def install() -> None:
    """From now on this process has it, for all tensors of torch's default group."""
    register: Any = torch_internals.register_group

    def registered(group: Any, gloo: Any, _: Any, *arguments: Any, **named: Any) -> None:
        register(group, gloo, None, *arguments, **named)  # which takes backends in C++ alone

    changed: Any = SimpleNamespace(
        internals=torch_internals, groups=groups, watched=watched_group, bucket=public_bucket.BaguaBucket
    )
    changed.internals.register_group = registered
    changed.internals.unconnected_nccl = _Backend
    changed.internals.gpu_for_nccl = lambda _: os.environ["RANK"]
    changed.internals.connect_nccl = lambda backend, _: backend.connect()
    changed.internals.leave_nccl_errors_to_others = lambda: None
    changed.groups.NcclGroup = _Group
    changed.watched._is_on_gpu = lambda _: True
    changed.bucket.everybody = lambda _, group: group.get_global_communicator()  # as of buckets on GPUs
    initialization._checked_regroup = lambda *_: torch.device("cpu")
    torch.cuda.is_current_stream_capturing = lambda: False


class _Work:
    def __init__(self) -> None:
        self.is_over = threading.Event()

    def wait(self) -> bool:
        return True  # a stream does

    def is_completed(self) -> bool:
        return self.is_over.is_set()


class _Backend:
    """What torch has for NCCL."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        self._arguments = store, rank, world_size, groups.CONNECT_TIMEOUT, timeout
        self._gloo: Any = None
        self._is_aborted = threading.Event()
        self._error = "SUCCESS"
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Sequence[Any], _Work]] = queue.SimpleQueue()
        self.last = _Work()
        self.last.is_over.set()

    def connect(self) -> list[Any]:
        self._gloo = torch_internals.connected_gloo(*self._arguments)
        self._gloo._set_default_timeout(datetime.timedelta(days=1))  # a GPU has none
        threading.Thread(target=self._run, daemon=True).start()
        return []

    def name(self) -> str:
        return "nccl"

    def get_error(self) -> Any:
        return SimpleNamespace(name=self._error)

    def abort(self) -> None:
        self._is_aborted.set()
        if self._gloo is not None:
            torch_internals.abort_backend(self._gloo)

    def __getattr__(self, name: str) -> Any:
        def collective(*arguments: Any, **named: Any) -> _Work:
            assert not self._is_aborted.is_set(), "an illegal memory access"
            self.last = _Work()
            self._queue.put((lambda: getattr(self._gloo, name)(*arguments, **named), arguments, self.last))
            return self.last

        return collective

    def _run(self) -> None:
        while True:
            call, arguments, work = self._queue.get()
            try:
                call().wait()
            except RuntimeError:
                if os.environ[SIMULATED] == SOCKETS:
                    self._error = "REMOTE_ERROR"
                self._is_aborted.wait()
            if self._is_aborted.is_set():
                _spoil(arguments[:1])
            work.is_over.set()


def _spoil(values: Sequence[Any]) -> None:
    for one in values:
        if isinstance(one, torch.Tensor):
            one.detach().fill_(GARBAGE)
        elif isinstance(one, list):
            _spoil(one)


class _Group(NcclGroup):
    """With what it asks of CUDA."""

    def _synchronize_stream(self) -> None:
        self.backend.last.is_over.wait()

    _synchronize_device = _synchronize_stream

    def _recorded(self) -> Any:
        return SimpleNamespace(synchronize=self.backend.last.is_over.wait)
