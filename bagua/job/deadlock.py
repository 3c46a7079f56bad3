"""Proves that ranks of a group wait for different operations: a deadlock, which no patience ends. Pure functions, and
what they read.

Each rank counts the operations that it begins in a group, in order, which is the same on all ranks of a healthy job. A
rank that waits says which operation it waits for, and what it began before (`Post`). Two ranks are deadlocked if they
began the same operations up to some point and different ones from there on, of which none has ended, and wait for two
of those: neither comes to what the other waits for. Example: one rank alone freezes a layer and wants to compare its
plan with the others, which sum gradients. Time says nothing: a rank that is behind, or in no operation, or in a message
between two ranks, is in no such pair, however long it takes.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

LOG_LENGTH = 16  # operations; ranks are at most a few apart


class Post(NamedTuple):
    """
    Attributes:
        since: when the wait began, which tells waits of a rank apart.
        what: is waited for.
        can_give_up: only other ranks can delay it, and it ends if it is deadlocked.
        position: of the operation that is waited for, counted from 1.
        done: the position of the last one that has ended.
        begun: how many operations, this one among them.
        digests: of all operations up to `begun`, and up to those before it; the last is of all.
    """

    since: float
    what: str
    can_give_up: bool
    position: int
    done: int
    begun: int
    digests: tuple[int, ...]

    @property
    def first(self) -> int:
        """The position that the first digest is of."""
        return self.begun - len(self.digests) + 1


class OperationOrder:
    """Of a group, in this process. One thread at a time, as the group's operations."""

    def __init__(self) -> None:
        self._count = 0
        self._done = 0
        self._digests = deque([0], LOG_LENGTH)

    def begin(self, what: str) -> int:
        """Another operation, of the same name on all ranks. Returns its position."""
        self._digests.append(zlib.crc32(what.encode(), self._digests[-1]))
        self._count += 1
        return self._count

    def end(self, position: int) -> None:
        """The operation at this position was waited for."""
        self._done = max(self._done, position)

    def post(self, since: float, what: str, can_give_up: bool, position: int) -> Post:
        """A wait for the operation at `position`."""
        return Post(since, what, can_give_up, position, self._done, self._count, tuple(self._digests))


def deadlocked(posts: Mapping[int, Post]) -> dict[int, Post]:
    """Those of a group's posts, by rank, that have to give up."""
    states = {post._replace(since=0.0) for post in posts.values()}  # few, however many ranks there are
    return {
        rank: post
        for rank, post in posts.items()
        if post.can_give_up and any(_are_deadlocked(post, other) for other in states)
    }


def _are_deadlocked(one: Post, other: Post) -> bool:
    difference = _first_difference(one, other)
    return (
        difference is not None
        and one.what != other.what
        and max(one.done, other.done) < difference <= min(one.position, other.position)
    )


def _first_difference(one: Post, other: Post) -> int | None:
    """The position from which on they began different operations. None: there is none yet, or none that is known."""
    begin, end = max(one.first, other.first), min(one.begun, other.begun)
    if begin > end or one.digests[begin - one.first] != other.digests[begin - other.first]:
        return None
    return next(
        (
            position
            for position in range(begin + 1, end + 1)
            if one.digests[position - one.first] != other.digests[position - other.first]
        ),
        None,
    )
