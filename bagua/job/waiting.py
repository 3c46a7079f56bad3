"""What a thread of this process waits for, as the roll call's thread sees it."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from threading import get_ident
from typing import Protocol

import torch.distributed as dist

from bagua.job.deadlock import LOG_LENGTH, MAIN_THREAD, SHORT_LOG, Answer, OperationOrder, Wait, ranges_of
from bagua.job.gone import Gone

# In a collective, before anybody is told: longer than collectives of a step take, so that a job that is well asks the
# store nothing; short compared with the window of a call (failure_report.ROLL_CALL_S), within which this rank has to
# answer.
PATIENCE_S = 0.5
TICK_S = 0.25  # between two looks whether a wait takes long, and whether there is news in the store


class Members(Protocol):
    """Those that communicate: a BaguaProcessGroup, or one of its communicators."""

    @property
    def ranks(self) -> Sequence[int]:
        """Global ones."""

    @property
    def group_name(self) -> str: ...

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """RuntimeError: it has been destroyed."""

    @property
    def timeout(self) -> datetime.timedelta:
        """Of a collective on the CPU."""

    def raise_if_aborted(self, what: str) -> None:
        """RuntimeError: this process has called `abort`."""

    def abort(self) -> None:
        """Ends what is under way in this process, on any thread."""


def operations_of(group: Members) -> OperationOrder | None:
    """That all members begin in the same order. None: nobody counts them."""
    operations: OperationOrder | None = getattr(group, "operations", None)
    return operations


# What threads of this process have been called for, by the user.
_calls: dict[int, str] = {}


@contextlib.contextmanager
def called_for(what: str) -> Iterator[None]:
    """This thread does what the user knows under this name: "save_checkpoint". Within another one, that counts."""
    thread = get_ident()
    is_outer = thread not in _calls
    _calls.setdefault(thread, what)
    try:
        yield
    finally:
        if is_outer:
            del _calls[thread]


class Waiting:
    """A collective under way in this process, while it is entered. Begins and ends without a lock: what it does to the
    dictionary is one step. May be entered again for the next one of the same kind.

    Args:
        ranks: global, that take part.
        what: is waited for.
        group: which carries it, and is aborted to end the wait. None: no thread waits in it; others watch over it.
        order, position: of the operation. None: it is in no order. The position may be set before it is entered.
        can_give_up: an exchange of a few bytes, which only other ranks can delay: it is ended if it is deadlocked.
        is_ended_by_abort: False: it is within another one, which is, or nobody can end it.

    Attributes:
        thread: that waits.
        is_deadlocked: it was ended for that.
        gone: it was ended because this rank is.
    """

    __slots__ = (
        *("_all", "_group", "_is_ended_by_abort", "_order", "can_give_up", "gone", "is_deadlocked", "position"),
        *("ranks", "since", "thread", "what"),
    )

    def __init__(
        self,
        all_of_them: dict[int, Waiting],
        ranks: Sequence[int],
        what: str,
        group: Members | None = None,
        order: OperationOrder | None = None,
        position: int | None = None,
        can_give_up: bool = False,
        is_ended_by_abort: bool = True,
    ) -> None:
        self._all, self.ranks, self.what = all_of_them, tuple(ranks), what
        self._group, self._order, self.position, self.can_give_up = group, order, position, can_give_up
        self._is_ended_by_abort = is_ended_by_abort
        self.is_deadlocked = False
        self.gone: Gone | None = None
        self.since = 0.0
        self.thread = 0

    @property
    def is_of_a_thread(self) -> bool:
        """Whether one waits in it."""
        return self._group is not None

    @property
    def timeout_s(self) -> float:
        """How long it may take."""
        return 0.0 if self._group is None else self._group.timeout.total_seconds()

    @property
    def operation(self) -> tuple[OperationOrder, int] | None:
        """Order and position. None: it is in none."""
        return None if self._order is None or self.position is None else (self._order, self.position)

    def end(self, gone: Gone | None = None) -> None:
        """On any thread. None: it is deadlocked."""
        if self._group is None or not self._is_ended_by_abort or self.gone is not None or self.is_deadlocked:
            return
        self.gone, self.is_deadlocked = gone, gone is None
        self._group.abort()

    def __enter__(self) -> None:
        self.thread = get_ident()
        self.since = time.monotonic()
        self._all[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del self._all[id(self)]


def outermost(waits: Iterable[Waiting]) -> dict[int, Waiting]:
    """By thread, the wait that all others of the thread are within."""
    found: dict[int, Waiting] = {}
    for wait in sorted(waits, key=lambda wait: wait.since):
        if wait.is_of_a_thread:
            found.setdefault(wait.thread, wait)
    return found


def doing_of(wait: Waiting) -> str:
    """What the thread of this wait, which is its outermost one, does, in words of the user where they are known."""
    return _calls.get(wait.thread) or wait.what.removeprefix("waiting for ")


def answer_of(waits: Sequence[Waiting], orders: Iterable[OperationOrder]) -> Answer:
    """What this process says of itself.

    Args:
        waits: all of them, from before this call: the orders only go on.
        orders: in which it begins operations.
    """
    numbers: defaultdict[int | None, int] = defaultdict(lambda: len(numbers))
    numbers[threading.main_thread().ident] = MAIN_THREAD
    outer = outermost(waits)
    said: list[Wait] = []
    lengths = dict.fromkeys(orders, SHORT_LOG)
    for wait in waits:
        if wait.is_of_a_thread and (operation := wait.operation) is not None:
            order, position = operation
            first = outer[wait.thread]
            lengths[order] = LOG_LENGTH
            number, ranks = numbers[wait.thread], ranges_of(wait.ranks)
            said.append(Wait(number, first.since, doing_of(first), order.name, position, wait.can_give_up, ranks))
    logs = {order.name: order.log(numbers[order.thread], length) for order, length in lengths.items()}
    return Answer(said, logs, bool(outer))
