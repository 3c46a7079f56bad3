"""Detects that the ranks of a group wait for different operations: a deadlock, which no patience ends.

The roll call's thread owns one `DeadlockDetector` and shows it what this process waits for. A rank that has waited for
POST_S says so in the job's store. A rank in an exchange of a few bytes, which only the other ranks can delay, compares:
if all of them wait, not all of them for the same, and nobody gets any further, it gives up. Its connections close, the
collectives of the other ranks fail, and the roll call says what each rank was doing. Example: one rank alone freezes a
layer and wants to compare its plan with the others, which sum gradients.

[Note: keys] "bagua/waits/<group>/<rank>": JSON of a `_Post`. It is posted again and again, which tells a rank that
waits from one whose threads stand still, and which may have left its wait long ago.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import NamedTuple

from bagua.collectives.torch_internals import Store
from bagua.collectives.waiting import Waiting

# Collectives of a step take less, so that a job that is well posts nothing.
POST_S = 5.0
REPEAT_S = 1.0  # between two posts, and between two comparisons
STUCK_S = 4.0  # nobody gets any further for so long: a deadlock

_PREFIX = "bagua/waits"


class _Post(NamedTuple):
    what: str
    since: float  # tells waits of a rank apart
    number: int  # grows from post to post


_Posts = tuple[_Post, ...]


class DeadlockDetector:
    """
    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._number = 0
        self._next = 0.0
        # By wait: when its deadlock was first seen, and what the ranks had posted then.
        self._seen: dict[float, tuple[float, _Posts]] = {}

    def find(self, client: Store, waits: Iterable[Waiting]) -> list[Waiting]:
        """To be called now and then while this process waits.

        Returns:
            those of `waits` that can give up, and have to.
        """
        now = time.monotonic()
        long = [wait for wait in waits if now - wait.since >= POST_S]
        self._seen = {wait.since: self._seen[wait.since] for wait in long if wait.since in self._seen}
        if not long or now < self._next:
            return []
        self._next = now + REPEAT_S
        self._number += 1
        # Of each group the longest one.
        oldest = {wait.group: wait for wait in sorted(long, key=lambda wait: wait.since, reverse=True)}
        for group, wait in oldest.items():
            client.set(_key(group, self._rank), json.dumps(_Post(wait.what, wait.since, self._number)))
        return [wait for wait in oldest.values() if wait.can_give_up and self._is_stuck(client, wait, now)]

    def _is_stuck(self, client: Store, wait: Waiting, now: float) -> bool:
        posts = _read(client, wait)
        seen_at, first = self._seen.get(wait.since, (now, posts))
        if all(post.what == wait.what for post in posts) or [_id(post) for post in posts] != [
            _id(one) for one in first
        ]:
            self._seen.pop(wait.since, None)
            return False
        self._seen[wait.since] = seen_at, first
        return now - seen_at >= STUCK_S and all(
            post.number > before.number for post, before in zip(posts, first, strict=True)
        )


def _read(client: Store, wait: Waiting) -> _Posts:
    """Of all its ranks; empty if one has posted nothing."""
    keys = [_key(wait.group, rank) for rank in wait.ranks]
    if not client.check(keys):
        return ()
    return tuple(_Post(*json.loads(text)) for text in client.multi_get(keys))


def _key(group: str, rank: int) -> str:
    return f"{_PREFIX}/{group}/{rank}"


def _id(post: _Post) -> tuple[str, float]:
    return post.what, post.since
