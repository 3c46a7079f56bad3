"""Makes the groups of an epoch, and puts them where programs look: torch's default group and Bagua's, RANK and
WORLD_SIZE. What depends on the backend is here alone; docs/design/regroup.md says what NCCL's would do.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from bagua.collectives.group_topology import GroupTopology, topology_of
from bagua.collectives.process_group import BaguaProcessGroup, adopt, set_default_group
from bagua.job import torch_internals
from bagua.regroup.watched_group import OnFailure, WatchedGroup, WhyNot

if TYPE_CHECKING:
    from bagua.job.torch_internals import Store
    from bagua.regroup.epochs import Epoch

# Connecting takes some milliseconds once all members are there for it. One that is paused just then is a reason to try
# again, with all of them.
CONNECT_TIMEOUT = datetime.timedelta(seconds=20)
# The default group, and what carries operations beside its collectives.
NAMES = ("default", "background")


class Connecting:
    """The backends of an epoch's groups, on their way. gloo waits for a member that is gone until its timeout; whoever
    knows better leaves the thread to that, and connects anew without the member.

    Args:
        server: of the job's store, to which the thread makes a connection of its own.
        epoch: of the groups.
        rank: of this process in it.
        timeout: of collectives.
    """

    def __init__(self, server: Store, epoch: Epoch, rank: int, timeout: datetime.timedelta) -> None:
        self._future: Future[list[Any]] = Future()
        self._arguments = server, epoch, rank, timeout
        threading.Thread(target=self._run, name="bagua-connect", daemon=True).start()

    def _run(self) -> None:
        server, epoch, rank, timeout = self._arguments
        try:
            client = torch_internals.second_client(server)
            client.set_timeout(CONNECT_TIMEOUT)
            self._future.set_result(
                [
                    torch_internals.connected_gloo(
                        torch_internals.PrefixStore(f"groups/{epoch.key}/{name}", client),
                        *(rank, len(epoch.members), CONNECT_TIMEOUT, timeout),
                    )
                    for name in NAMES
                ]
            )
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, wait: Callable[[], bool]) -> list[Any] | None:
        """The backends, by NAMES. None: `wait`, which is called again and again, was not True any more.

        Raises:
            RuntimeError: they could not be connected.
        """
        while not self._future.done():
            if not wait():
                return None
        return self._future.result()


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


def abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Ends what is under way in them in this process. Any thread."""
    for group in groups:
        # One that has been destroyed meanwhile has nothing under way.
        with contextlib.suppress(RuntimeError):
            torch_internals.abort_group(group)


class Groups:
    """Of the present epoch. On the training thread.

    Args:
        server: of the job's store.
        timeout: of collectives.
        on_failure: as of WatchedGroup, with the epoch of the group in front.
        why_not: as of WatchedGroup.
    """

    def __init__(
        self,
        server: Store,
        timeout: datetime.timedelta,
        on_failure: Callable[[Epoch, Exception], None],
        why_not: WhyNot,
    ) -> None:
        self._server, self._timeout, self._on_failure, self._why_not = server, timeout, on_failure, why_not
        self._made: list[WatchedGroup] = []
        self.default: BaguaProcessGroup | None = None

    def install(self, epoch: Epoch, rank: int, backends: list[Any]) -> BaguaProcessGroup:
        """In place of those of the epoch before. Waits for nobody."""
        self.remove()
        store = torch_internals.PrefixStore(f"default_group/{epoch.key}", self._server)
        on_failure: OnFailure = functools.partial(self._on_failure, epoch)
        self._made = [WatchedGroup(backend, on_failure, self._why_not) for backend in backends]
        for name, group, backend in zip(NAMES, self._made, backends, strict=True):
            torch_internals.register_group(
                group, backend, f"bagua_{name}_{epoch.number}", store, is_default=name == NAMES[0]
            )
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(len(epoch.members))
        self.default = adopt(
            self.default, self._made[0], self._made[1], self._timeout, functools.partial(_topology_of, epoch)
        )
        set_default_group(self.default)
        return self.default

    @property
    def made(self) -> tuple[dist.ProcessGroup, ...]:
        """torch's groups of the epoch whose groups were installed last."""
        return tuple(self._made)

    def forget(self) -> None:
        """Keep none: those that torch destroys are freed, and their connections closed."""
        self._made, self.default = [], None

    def remove(self) -> None:
        """torch has no group any more."""
        self._made = []
        if dist.is_initialized():
            dist.destroy_process_group()
