"""Makes the groups of an epoch, and puts them where programs look: torch's default group and Bagua's, RANK and
WORLD_SIZE. Which backends they have is known here alone: gloo, and for tensors on GPUs NCCL beside it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua.collectives.group_topology import GroupTopology, topology_of
from bagua.collectives.process_group import BaguaProcessGroup, adopt, set_default_group
from bagua.job import torch_internals
from bagua.job.torch_internals import Store
from bagua.regroup.epochs import Epoch
from bagua.regroup.nccl_group import NcclGroup, NcclWatch
from bagua.regroup.watched_group import OnFailure, WatchedGroup, WhyNot

# Connecting takes some milliseconds once all members are there for it, and with NCCL up to some seconds. One that is
# paused just then is a reason to try again, with all of them.
CONNECT_TIMEOUT = datetime.timedelta(seconds=20)
NCCL_CONNECT_TIMEOUT = datetime.timedelta(seconds=60)
PAUSE_S = 0.002
# The default group, and what carries operations beside its collectives. NCCL is in the first one.
NAMES = ("default", "background")


class Backends(NamedTuple):
    """Of an epoch's groups, connected. gloo's are by NAMES."""

    gloo: list[Any]
    nccl: NcclGroup | None


class Connecting:
    """The backends of an epoch's groups, on their way. They wait for a member that is gone until their timeout; whoever
    knows better leaves the thread to that, and connects anew without the member.

    Args:
        server: of the job's store, to which the thread makes connections of its own.
        device: the GPU of this process; None: without NCCL.
        limit: to connect gloo.
    """

    def __init__(
        self,
        server: Store,
        epoch: Epoch,
        rank: int,
        timeout: datetime.timedelta,
        device: torch.device | None,
        names: Sequence[str] = NAMES,
        limit: datetime.timedelta = CONNECT_TIMEOUT,
    ) -> None:
        self._future: Future[Backends] = Future()
        self._server, self._epoch, self._rank, self._timeout = server, epoch, rank, timeout
        self._device, self._names, self._limit = device, names, limit
        self._lock = threading.Lock()  # guards both
        self._nccl: NcclGroup | None = None
        self._is_given_up = False
        threading.Thread(target=self._run, name="bagua-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            size = len(self._epoch.members)
            client = torch_internals.second_client(self._server)
            client.set_timeout(self._limit)
            gloo = [
                torch_internals.connected_gloo(
                    self._prefix(name, client), *(self._rank, size, self._limit, self._timeout)
                )
                for name in self._names
            ]
            self._future.set_result(Backends(gloo, self._connected_nccl(size)))
        except BaseException as error:
            self._future.set_exception(error)

    def _prefix(self, name: str, client: Store) -> Store:
        return torch_internals.PrefixStore(f"groups/{self._epoch.key}/{name}", client)

    def _connected_nccl(self, size: int) -> NcclGroup | None:
        if self._device is None:
            return None
        client = torch_internals.second_client(self._server)
        client.set_timeout(NCCL_CONNECT_TIMEOUT)
        backend = torch_internals.unconnected_nccl(self._prefix("nccl", client), self._rank, size, self._timeout)
        nccl = NcclGroup(backend, self._device, self._timeout)
        with self._lock:
            if self._is_given_up:
                raise RuntimeError("a member is gone")
            self._nccl = nccl
        works = torch_internals.connect_nccl(backend, self._device)
        while not all(one.is_completed() for one in works):
            if self._is_given_up:
                raise RuntimeError("a member is gone")
            time.sleep(PAUSE_S)
        problem = torch_internals.nccl_error(backend)  # also counts as completed
        if problem is not None:
            raise RuntimeError(f"NCCL could not connect: {problem}")
        return nccl

    def result(self, wait: Callable[[], bool]) -> Backends | None:
        """The backends. None: `wait`, which is called again and again, was not True any more.

        Raises:
            RuntimeError: they could not be connected.
        """
        begin = time.monotonic()
        limit = CONNECT_TIMEOUT if self._device is None else NCCL_CONNECT_TIMEOUT
        while not self._future.done():
            if not wait():
                self._give_up()
                return None
            # gloo keeps to its own.
            if self._device is not None and time.monotonic() - begin > limit.total_seconds():
                self._give_up()
                raise RuntimeError(f"NCCL has not connected within {limit.total_seconds():g} s")
        return self._future.result()

    def _give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            nccl = self._nccl
        if nccl is not None:
            # It may wait for the thread that connects.
            threading.Thread(target=nccl.leave, args=("a member is gone",), name="bagua-abort", daemon=True).start()


def _topology_of(epoch: Epoch) -> GroupTopology:
    """From what the members said of themselves when they were started, with the ranks that they had then: another one
    may be lost while its place is asked for. By their hosts, if they contradict each other, as those that have joined
    may: they were started with any numbers."""
    ranks = {one.first_rank: rank for rank, one in enumerate(epoch.members)}
    if len(ranks) == len(epoch.members):
        with contextlib.suppress(ValueError):
            found = topology_of({one.first_rank: one.place for one in epoch.members})
            return GroupTopology(tuple(tuple(ranks[one] for one in node) for node in found.nodes))
    nodes: dict[str, list[int]] = {}
    for rank, one in enumerate(epoch.members):
        nodes.setdefault(one.place.host, []).append(rank)
    return GroupTopology(tuple(map(tuple, nodes.values())))


def abort(groups: Sequence[WatchedGroup], why: str = "the epoch is over") -> None:
    """Ends what is under way in them in this process. Any thread."""
    for group in groups:
        # One that has been destroyed meanwhile has nothing under way.
        with contextlib.suppress(RuntimeError):
            group.abort(why)


class Groups:
    """Of the present epoch. On the training thread.

    Args:
        device: the GPU of this process, on which NCCL communicates; None: without NCCL.
        on_failure: as of WatchedGroup, with the epoch of the group in front.
        why_not: as of WatchedGroup.
        on_problem, why_waiting: as of NcclWatch.
    """

    def __init__(
        self,
        server: Store,
        timeout: datetime.timedelta,
        device: torch.device | None,
        on_failure: Callable[[Epoch, Exception], None],
        why_not: WhyNot,
        on_problem: Callable[[Epoch, str], None],
        why_waiting: Callable[[Epoch, int], str | None],
    ) -> None:
        self._server, self._timeout, self._on_failure, self._why_not = server, timeout, on_failure, why_not
        self.device = device
        self._made: list[WatchedGroup] = []
        self.default: BaguaProcessGroup | None = None
        self.nccl: NcclGroup | None = None
        self._watch = None if device is None else NcclWatch(on_problem, why_waiting)

    def connecting(self, epoch: Epoch, rank: int) -> Connecting:
        """Backends of an epoch, on their way."""
        return Connecting(self._server, epoch, rank, self._timeout, self.device)

    def install(self, epoch: Epoch, rank: int, backends: Backends) -> BaguaProcessGroup:
        """In place of those of the epoch before. Waits for nobody."""
        self.remove()
        store = torch_internals.PrefixStore(f"default_group/{epoch.key}", self._server)
        on_failure: OnFailure = functools.partial(self._on_failure, epoch)
        self.nccl = backends.nccl
        self._made = [
            WatchedGroup(gloo, nccl, on_failure, self._why_not)
            for gloo, nccl in zip(backends.gloo, (self.nccl, None), strict=True)
        ]
        for name, group in zip(NAMES, self._made, strict=True):
            torch_internals.register_group(
                group,
                group.gloo,
                None if group.nccl is None else group.nccl.backend,
                f"bagua_{name}_{epoch.number}",
                store,
                is_default=name == NAMES[0],
            )
        if self._watch is not None and self.nccl is not None:
            self._watch.follow(self.nccl, epoch)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(len(epoch.members))
        self.default = adopt(
            self.default, self._made[0], self._made[1], self._timeout, functools.partial(_topology_of, epoch)
        )
        set_default_group(self.default)
        return self.default

    @property
    def made(self) -> tuple[WatchedGroup, ...]:
        """torch's groups of the epoch whose groups were installed last."""
        return tuple(self._made)

    def leave_gpu(self) -> None:
        """Nothing that was queued on the GPU for this epoch is under way any more, when this returns."""
        if self.nccl is not None:
            self.nccl.leave("the epoch is over")
            self.nccl.come_to_rest()

    def forget(self) -> None:
        """Keep none: those that torch destroys are freed, and their connections closed."""
        if self._watch is not None:
            self._watch.stop()
        self._made, self.default, self.nccl = [], None, None

    def remove(self) -> None:
        """torch has no group any more."""
        self.leave_gpu()
        self._made, self.nccl = [], None
        if dist.is_initialized():
            dist.destroy_process_group()
