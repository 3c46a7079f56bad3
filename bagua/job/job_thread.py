"""The thread of a process that does what the ranks of a job do together while their collectives take long.

One `JobThread` per process, owned by this module, as long as torch's default group lives. Any thread may use it. It
answers roll calls (bagua.job.roll_call), compares long waits (bagua.job.long_waits) and ends waits for ranks that are
gone (bagua.job.lost_ranks). A job that is well asks the store nothing: the thread looks into it only while a wait takes
longer than PATIENCE_S, once when a job begins, and a minute after a failure that the process has survived.

Where a process ends, or destroys its group, without an error, the thread tells the others that its rank has left: if it
has left too early, their errors say so.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from bagua import launch_environment
from bagua.job import gloo_exit, long_waits, peer_watch, places, presence, roll_call, verdicts
from bagua.job.deadlock import Answer, OperationOrder
from bagua.job.gone import LEFT, Gone
from bagua.job.lost_ranks import LostRanks
from bagua.job.roll_call import RollCall
from bagua.job.store_client import StoreClient
from bagua.job.torch_internals import Store, default_store
from bagua.job.waiting import PATIENCE_S, TICK_S, Members, Waiting, answer_of, outermost

SLOW_TICK_S = 1.0  # between two looks into the store, once a wait has taken
SLOW_AFTER_S = 5.0
STOP_S = 1.0
_KEYS = {roll_call.CALL: roll_call.NO_CALL, long_waits.INQUIRY: long_waits.NO_INQUIRY, verdicts.KEY: verdicts.EMPTY}


class JobThread:
    """
    Args:
        watched: the rank that this one watches.

    Attributes:
        waits: of this process; changed without a lock, see `Waiting`.
    """

    def __init__(self, store: Store, rank: int, watched: int | None = None) -> None:
        self._rank = rank
        self._store = StoreClient(store)
        self.waits: dict[int, Waiting] = {}
        self._orders: weakref.WeakValueDictionary[str, OperationOrder] = weakref.WeakValueDictionary()
        self._stop = threading.Event()
        self._verdicts = verdicts.VerdictReader()
        with contextlib.suppress(Exception):  # whoever calls the roll finds out, and says so
            self._verdicts.begin(store)
        self.roll_call = RollCall(self._store, rank, self._verdicts, self._stop)
        self._long_waits = long_waits.LongWaits(rank)
        self._lost = LostRanks(self._store, self.waits, watched, self._stop)
        self._has_keys = False
        self._next_look = 0.0
        if (own := presence.own_presence()) is not None:
            own.doing = self._doing
        self._thread = threading.Thread(target=self._run, name="bagua-job", daemon=True)
        self._thread.start()

    def is_of(self, store: Store) -> bool:
        return self._store.is_of(store)

    def stop(self) -> None:
        """Ends the thread, unless it hangs in the store."""
        self._stop.set()
        self._thread.join(STOP_S)
        self._lost.close()

    def count(self, order: OperationOrder) -> None:
        """Others may know how far this process has come in it, as long as it lives."""
        self._orders[order.name] = order

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whoever calls the roll finds out, and says so
            self._store.get()
        with contextlib.suppress(Exception):  # the store is gone, and with it all calls
            while not self._stop.is_set() and (not self._store.is_shut_down or _is_failing()):
                self.look()
                self._stop.wait(TICK_S)
            if not _is_failing():
                place = places.place_of_this_process()
                verdicts.add_gone(self._store.get(), Gone(self._rank, place.host, LEFT), place.door.token)

    def look(self) -> None:
        """What the thread does now and then."""
        now = time.monotonic()
        self._lost.look(now)
        self.roll_call.end_old_call()
        wait = self._oldest_wait()
        if wait is None or now - wait.since < PATIENCE_S or now < self._next_look:
            return
        self._next_look = now + (SLOW_TICK_S if now - wait.since > SLOW_AFTER_S else TICK_S)
        client = self._store.get()
        if not self._has_keys:
            for key, text in _KEYS.items():
                client.compare_set(key, "", text)
            self._has_keys = True
        call, inquiry, proven = (text.decode() for text in client.multi_get(list(_KEYS)))
        self.roll_call.look(client, call, wait)
        self._long_waits.look(client, inquiry, self._own_answer, list(self.waits.values()), now)
        for verdict in self._verdicts.new(client, proven):
            if isinstance(verdict, Gone):
                self._lost.note(verdict, now)
            elif isinstance(verdict, verdicts.Different):
                self._long_waits.note(verdict, list(self.waits.values()))
            elif verdict.rank == self._rank:
                self._end(verdict)
        self._lost.end_waits(now)

    def _own_answer(self) -> Answer:
        waits = list(self.waits.values())  # first: the orders only go on
        return answer_of(waits, [order for one in self._orders.valuerefs() if (order := one()) is not None])

    def _oldest_wait(self) -> Waiting | None:
        return min(list(self.waits.values()), key=lambda wait: wait.since, default=None)

    def _doing(self) -> str:
        """For those that ask this process."""
        wait = self._oldest_wait()
        return "" if wait is None else f"it is in {wait.what}"

    def _end(self, deadlocked: verdicts.Deadlocked) -> None:
        waits = list(self.waits.values())
        for thread, first in outermost(waits).items():
            if first.since == deadlocked.since:
                for wait in waits:
                    if (
                        wait.thread == thread
                        and (operation := wait.operation)
                        and operation[0].name == deadlocked.order
                    ):
                        wait.end()


def _is_failing() -> bool:
    """Whether the program ends with an error, or handles one: that a group is destroyed in `finally` does not prove
    that all went well."""
    handled: dict[Any, Any] = dict(sys._current_exceptions())
    # Up to Python 3.11 these are tuples, as of sys.exc_info.
    return gloo_exit.is_failing() or handled.get(threading.main_thread().ident) not in (None, (None, None, None))


_the_thread: JobThread | None = None
_watches_peers = True
_creation = threading.Lock()


def current_job_thread() -> JobThread:
    """Raises ValueError if torch.distributed is not initialized."""
    global _the_thread
    store = default_store()
    current = _the_thread
    if current is not None and current.is_of(store):
        return current
    with _creation:
        if _the_thread is None or not _the_thread.is_of(store):
            stop_job_thread()
            rank = dist.get_rank()
            local = launch_environment.local_world_size()
            watched = peer_watch.watched_by(rank, dist.get_world_size(), local) if _watches_peers else None
            _the_thread = JobThread(store, rank, watched)
        return _the_thread


def is_watch_left_to_others() -> bool:
    """See `leave_watch_to_others`."""
    return not _watches_peers


def leave_watch_to_others(leaves: bool) -> None:
    """Whether somebody else in this process watches the other ranks, and ends waits for those that are gone. For groups
    that are made from now on."""
    global _watches_peers
    _watches_peers = not leaves


def waiting_for(
    ranks: Sequence[int],
    what: str,
    group: Members | None = None,
    order: OperationOrder | None = None,
    position: int | None = None,
    can_give_up: bool = False,
    is_ended_by_abort: bool = True,
) -> Waiting | None:
    """A context: the calling thread is in a collective. None where there is nobody to wait for, or torch.distributed is
    not initialized. The arguments are those of `Waiting`."""
    if len(ranks) > 1 and dist.is_initialized():
        waits = current_job_thread().waits
        return Waiting(waits, ranks, what, group, order, position, can_give_up, is_ended_by_abort)
    return None


@gloo_exit.before_pause
def stop_job_thread() -> None:
    # A thread that is in the store while the interpreter is taken down can end the process with a signal.
    if _the_thread is not None:
        _the_thread.stop()
