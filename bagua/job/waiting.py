"""What a thread of this process waits for, as the roll call's thread sees it."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from bagua.job.deadlock import OperationOrder, Post
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
    """That all members begin in the same order. None: nobody counts them, as of communicators."""
    operations: OperationOrder | None = getattr(group, "operations", None)
    return operations


class Waiting:
    """A collective under way in this process, while it is entered. Begins and ends without a lock: what it does to the
    dictionary is one step.

    Args:
        all_of_them: of the process.
        ranks: global, that take part.
        what: is waited for.
        group: which carries it, and is aborted to end the wait. None: it is ended by others.
        position: in the order of the group's operations. None: it is in none.
        can_give_up: an exchange of a few bytes, which only other ranks can delay: it is ended if it is deadlocked.

    Attributes:
        is_deadlocked: it was ended for that.
        gone: it was ended because this rank is.
    """

    __slots__ = ("_all", "_group", "_position", "can_give_up", "gone", "is_deadlocked", "ranks", "since", "what")

    def __init__(
        self,
        all_of_them: dict[int, Waiting],
        ranks: Sequence[int],
        what: str,
        group: Members | None = None,
        position: int | None = None,
        can_give_up: bool = False,
    ) -> None:
        self._all, self.ranks, self.what = all_of_them, tuple(ranks), what
        self._group, self._position, self.can_give_up = group, position, can_give_up
        self.is_deadlocked = False
        self.gone: Gone | None = None
        self.since = 0.0

    @property
    def can_end(self) -> bool:
        """Whether somebody here can end it."""
        return self._group is not None

    @property
    def deadline(self) -> str:
        """How long it may take, for messages."""
        return "" if self._group is None else f"within the group's timeout of {self._group.timeout.total_seconds():g} s"

    def post(self) -> tuple[str, Post] | None:
        """The group, by the same name on all ranks, and what others may know of the wait. None: it is in no order."""
        group = self._group
        with contextlib.suppress(RuntimeError):  # it was destroyed
            if group is not None and self._position is not None and group.torch_group is not None:
                operations = operations_of(group)
                assert operations is not None, "which have given the position"
                post = operations.post(self.since, self.what, self.can_give_up, self._position)
                return group.torch_group.group_name, post
        return None

    def end(self, gone: Gone | None = None) -> None:
        """On any thread. None: it is deadlocked."""
        if self._group is None or self.gone is not None or self.is_deadlocked:
            return
        self.gone, self.is_deadlocked = gone, gone is None
        self._group.abort()

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self._all[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del self._all[id(self)]
