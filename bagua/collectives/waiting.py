"""What a thread of this process waits for, as the roll call's thread sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist


class Group(Protocol):
    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """RuntimeError: it has been destroyed."""


class Waiting:
    """A collective under way in this process, while it is entered. Begins and ends without a lock: what it does to the
    dictionary is one step.

    Attributes:
        is_deadlocked: the other ranks wait for something else, and `give_up` was called.
    """

    __slots__ = ("_all", "_give_up", "_group", "is_deadlocked", "ranks", "since", "what")

    def __init__(
        self,
        all_of_them: dict[int, Waiting],
        ranks: Sequence[int],
        what: str,
        group: Group | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        self._all, self.ranks, self.what = all_of_them, tuple(ranks), what
        self._group, self._give_up = group, give_up
        self.is_deadlocked = False
        self.since = 0.0

    @property
    def group(self) -> str:
        """The same name on all ranks; empty where there is none."""
        with contextlib.suppress(RuntimeError):  # it was destroyed
            if self._group is not None and self._group.torch_group is not None:
                return self._group.torch_group.group_name
        return ""

    @property
    def can_give_up(self) -> bool:
        return self._give_up is not None

    def give_up(self) -> None:
        """End it, on any thread."""
        assert self._give_up is not None
        self.is_deadlocked = True
        self._give_up()

    def __enter__(self) -> None:
        self.since = time.monotonic()
        self._all[id(self)] = self

    def __exit__(self, *_: object) -> None:
        del self._all[id(self)]
