"""A process group for torchft, whose ranks all know within half a second that one of them was killed.

Import it where torchft is installed: `pip install '.[torchft]'` in a checkout of Bagua.

torchft makes a group for each quorum: `_Quorum`, which owns its threads (bagua.regroup.detection), and the rank's part
of a bagua.regroup.watched_group. A quorum is an epoch that no other one follows. Its members have tokens of their own,
since several may be threads of one process.

[Note: what a loss costs] torchft drops the step of a rank whose collective has failed, and that rank takes the state of
one whose collective has not. So a rank that is told of a loss begins no collective any more, and the one that it is in
gets GRACE_S to end: what the lost rank gave may be on its way. And a rank is taken for lost at once if its port refuses
a connection. If it lives all the same, it is in the next quorum.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import logging
import os
import queue
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bagua.error_text import one_line
from bagua.job import gloo_exit, torch_internals
from bagua.job.failure_report import CollectiveError
from bagua.job.places import place_of_this_process
from bagua.misuse import shown
from bagua.rank_list import rank_list
from bagua.regroup.detection import Mailbox, Watch
from bagua.regroup.epochs import Epoch, EpochStore, Member
from bagua.regroup.groups import CONNECT_TIMEOUT, NAMES, Connecting
from bagua.regroup.watched_group import WatchedGroup

try:
    from torchft.process_group import ProcessGroupWrapper
except ModuleNotFoundError as error:
    raise ImportError(
        f"bagua.torchft needs torchft, and {error.name} is not installed.\n"
        "Install it in this environment: pip install torchft. In a checkout of Bagua: pip install '.[torchft]'."
    ) from error

if TYPE_CHECKING:
    from bagua.job.torch_internals import Store

__all__ = ["ProcessGroupBagua"]

PREFIX = "bagua"  # of the keys of a quorum
GRACE_S = 0.1
NAME_S = 0.1  # for the watch to find out why a collective has failed, before the others are told
LOOK_S = 0.002  # between two looks whether it is worth while to go on connecting
MAX_ERROR_LENGTH = 200
STOP_S = 1.0

_logger = logging.getLogger("bagua")


def _let_ddp_drop_steps() -> None:
    """In torchft 0.2.0, a failed all-reduce ends the backward pass of its DDP, and the process, with an AssertionError.
    Later versions give the bucket back as it is, since the Manager drops the step."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a nightly build has another name
        if importlib.metadata.version("torchft") == "0.2.0":
            from torchft.ddp import DistributedDataParallel

            _reduce_bucket.__annotations__.clear()  # torch compares them as objects
            DistributedDataParallel._comm_hook = staticmethod(_reduce_bucket)


def _reduce_bucket(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = state.allreduce(bucket.buffer())  # of the Manager
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if work.wait():
        future = work.get_future()
        return getattr(future, "_fut", future)  # after an error, a plain one
    future.set_result(bucket.buffer())
    return future


_let_ddp_drop_steps()


class ProcessGroupBagua(ProcessGroupWrapper):  # type: ignore[misc]  # torchft has no types
    """
    For `torchft.Manager`, in the place of `torchft.ProcessGroupGloo`. Collectives are gloo's. If a rank is killed, or
    leaves a collective that others are in, the collective fails on all of them, not on its neighbors alone; and
    connecting ends if a rank is lost meanwhile.

    Args:
        timeout: of collectives, and of connecting, which has a limit of 20 s as well.

    Raises:
        TypeError: `timeout` is not a timedelta.
        ValueError: it is not longer than 0.
    """

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        super().__init__(_checked(timeout))
        self._quorum: _Quorum | None = None
        self._finalizer: weakref.finalize[..., ProcessGroupBagua] | None = None

    def _create_pg(self, store: Store, rank: int, world_size: int) -> WatchedGroup:
        # By torchft, within `configure` or `reconfigure`, after `abort`.
        quorum = self._quorum = _Quorum(store, rank, self._timeout)
        # Those who let go of a group may not have shut it down.
        self._finalizer = weakref.finalize(self, _orphans.put, quorum)
        self._finalizer.atexit = False
        _keep()
        try:
            return quorum.connect(world_size)
        except BaseException:
            self._end(None)
            raise

    def abort(self, errored: bool = True) -> None:
        """End the collectives under way, on the other ranks as well, and free the group. Any thread.

        Args:
            errored: there was an error. Otherwise the others are not told: they may still be receiving what this rank
                gave them.
        """
        self._end("abort() was called" if errored else None)
        super().abort(errored)

    def shutdown(self) -> None:
        """Free the group. The others notice when they need this rank."""
        self.abort(errored=False)

    def errored(self) -> Exception | None:
        """The error of a collective that has failed since the group was made."""
        return None if self._quorum is None else self._quorum.failed

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """
        Args:
            timeout: of collectives that begin from now on, and of connecting.

        Raises:
            TypeError: `timeout` is not a timedelta.
            ValueError: it is not longer than 0.
        """
        super().set_timeout(_checked(timeout))
        if self._quorum is not None:
            self._quorum.set_timeout(timeout)

    def rank(self) -> int:
        """Of this process in the quorum."""
        return int(self.parent.rank())

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """By which torch registers it."""
        return "torchft-bagua"

    def _end(self, why: str | None) -> None:
        quorum, self._quorum = self._quorum, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if quorum is not None:
            quorum.end(why)


def _checked(timeout: datetime.timedelta) -> datetime.timedelta:
    if not isinstance(timeout, datetime.timedelta):
        raise TypeError(f"timeout is {shown(timeout)}. Pass a datetime.timedelta, such as timedelta(seconds=60).")
    if timeout <= datetime.timedelta(0):
        raise ValueError(f"timeout is {timeout.total_seconds():g} s, and has to be longer than 0.")
    return timeout


class _Quorum:
    """
    A group from its `configure` to the next, in this process. Any thread.

    Args:
        store: which no other quorum uses.
        rank: of this process.
        timeout: of collectives, and of connecting.

    Attributes:
        failed: the error of the first collective that has failed.
    """

    def __init__(self, store: Store, rank: int, timeout: datetime.timedelta) -> None:
        self.failed: CollectiveError | None = None
        self._rank, self._timeout = rank, timeout
        self._limit = min(timeout, CONNECT_TIMEOUT)  # all have come from the same answer of the Lighthouse
        self._token = secrets.token_hex(8)
        self._server = torch_internals.PrefixStore(PREFIX, store)
        self._store, self._store_lock = EpochStore(self._server), threading.Lock()
        self._lock = threading.Lock()  # guards the next two
        self._why: str | None = None  # it has failed
        self._group: WatchedGroup | None = None
        self._is_known, self._is_over = threading.Event(), threading.Event()
        self._watch: Watch | None = None
        self._mailbox: Mailbox | None = None
        gloo_exit.expect_groups()
        _quorums.add(self)

    def connect(self, world_size: int) -> WatchedGroup:
        """
        Raises:
            RuntimeError: not all ranks have come in time, or one is lost.
        """
        self._epoch = epoch = self._meet(world_size)
        self._watch = Watch(self._token, self._on_lost, confirms=False)
        mail = EpochStore(torch_internals.second_client(self._server))
        self._mailbox = Mailbox(mail, self._token, self._on_mail, "Until the next quorum, no rank can tell this one.")
        self._mailbox.follow(epoch, self._store)
        self._watch.follow(epoch)
        connecting = Connecting(self._server, epoch, self._rank, self._timeout, None, NAMES[:1], self._limit)
        try:
            backends = connecting.result(self._goes_on)
        except RuntimeError as error:
            self._fail(f"{rank_list([self._rank])} could not connect ({one_line(error, MAX_ERROR_LENGTH)})")
            raise
        if backends is None:
            raise RuntimeError(f"The group could not be connected: {self._why or 'it was aborted'}.")
        group = WatchedGroup(backends.gloo[0], None, self._on_failure, self._why_not)
        with self._lock:
            self._group = group
        return group

    def _meet(self, world_size: int) -> Epoch:
        member = Member(self._token, place_of_this_process(), self._rank)
        self._server.set(f"member/{self._rank}", Epoch(0, (member,)).to_json())
        keys = [f"member/{rank}" for rank in range(world_size)]
        try:
            self._server.wait(keys, self._limit)
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._server.check([key])]
            raise dist.DistStoreError(
                f"{rank_list(missing or [self._rank]).capitalize()} of {world_size} did not begin to connect within"
                f" {self._limit.total_seconds():g} s.\n"
                f"Rank {self._rank} of torchft's quorum has waited.\n"
                f"torchft drops the step, and makes a new quorum. See the log of that replica.\n"
                f"Backend error: {one_line(error, MAX_ERROR_LENGTH)}"
            ) from error
        return Epoch(0, tuple(Epoch.of_json(text).members[0] for text in self._server.multi_get(keys)))

    def _goes_on(self) -> bool:
        time.sleep(LOOK_S)
        return self._why is None and not self._is_over.is_set()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        group = self._group
        if group is not None:
            group.gloo._set_default_timeout(timeout)

    # --- a rank is lost ----------------------------------------------------------------------------------------------

    def _on_lost(self, member: Member, how: str) -> None:
        """On a thread of the watch."""
        rank = self._epoch.rank_of(member.token)
        self._fail(f"{rank_list([rank], {rank: member.place.host})} {how}")

    def _on_mail(self, _: Epoch, why: str) -> None:
        if self._note(why):
            self._leave(GRACE_S)

    def _fail(self, why: str, grace_s: float = GRACE_S) -> None:
        """This process has found out that no collective can succeed any more."""
        if self._note(why):
            with contextlib.suppress(RuntimeError), self._store_lock:  # the store may be gone with a rank
                self._store.tell(self._epoch, why, [one for one in self._epoch.tokens if one != self._token])
            self._leave(grace_s)

    def _note(self, why: str) -> bool:
        """Whether this is news."""
        with self._lock:
            if self._why is not None or self._is_over.is_set():
                return False
            self._why = why
        self._is_known.set()
        _logger.warning(f"{why[:1].upper()}{why[1:]}: the collectives of this quorum are ended.")
        return True

    def _leave(self, grace_s: float) -> None:
        self._is_over.wait(grace_s)
        group = self._group
        if group is not None:
            group.abort()

    def _on_failure(self, error: Exception) -> None:
        """On the thread that waits for a collective.

        Raises:
            CollectiveError: always.
        """
        self._is_known.wait(NAME_S)
        self._fail(f"a collective of {rank_list([self._rank])} failed ({one_line(error, MAX_ERROR_LENGTH)})", 0)
        self._leave(0)  # others may have told this rank, and may need to be told by it
        failure = self._failure(error)
        self.failed = self.failed or failure
        raise failure from error

    def _why_not(self) -> CollectiveError | None:
        if self._why is None:
            return None
        failure = self._failure(None)
        self.failed = self.failed or failure
        return failure

    def _failure(self, error: Exception | None) -> CollectiveError:
        cause = "" if error is None else f"\nBackend error: {one_line(error, MAX_ERROR_LENGTH)}"
        return CollectiveError(
            f"A collective was aborted: {self._why or 'abort() or shutdown() was called'}.\n"
            f"It was on rank {self._rank} of {len(self._epoch.members)} of torchft's quorum.\n"
            f"torchft drops the step, and makes a new group. If ranks were not killed, see their logs.{cause}"
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def end(self, why: str | None) -> None:
        """
        Args:
            why: what the other ranks are told; None: nothing.
        """
        if why is not None and self._mailbox is not None:
            self._fail(f"{why} on {rank_list([self._rank])}", 0)
        self._is_over.set()
        self.end_threads(waits=False)
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort()

    def end_threads(self, waits: bool) -> None:
        """
        Args:
            waits: for those that watch, which may be connecting to a host that does not answer.
        """
        # They refer to this, which would be garbage for the collector alone, with its connections.
        watch, self._watch = self._watch, None
        mailbox, self._mailbox = self._mailbox, None
        if watch is not None:
            watch.stop(waits)
        if mailbox is not None:
            with contextlib.suppress(RuntimeError), self._store_lock:
                mailbox.stop(self._store)


_quorums: weakref.WeakSet[_Quorum] = weakref.WeakSet()
# Of groups that nobody has any more: finalizers run in any thread, where they must not wait.
_orphans: queue.SimpleQueue[_Quorum | None] = queue.SimpleQueue()
_keeper: threading.Thread | None = None


def _keep() -> None:
    """Somebody ends orphans from now on."""
    global _keeper
    if _keeper is None:
        _keeper = threading.Thread(target=_end_orphans, name="bagua-torchft", daemon=True)
        _keeper.start()


def _end_orphans() -> None:
    while (quorum := _orphans.get()) is not None:
        quorum.end(None)
        del quorum


@gloo_exit.before_pause
def _end_threads() -> None:
    for one in tuple(_quorums):
        one.end_threads(waits=True)
    if _keeper is not None:
        _orphans.put(None)
        _keeper.join(STOP_S)


def _forget_in_child() -> None:
    global _keeper, _orphans
    _quorums.clear()
    _keeper, _orphans = None, queue.SimpleQueue()


os.register_at_fork(after_in_child=_forget_in_child)
