"""What ranks that wait for long find out together: who does not take part, and whether they are deadlocked.

Owned by the job's thread (bagua.job.job_thread), which calls it as long as this process waits. One rank asks for all:
it raises the number of the inquiry in the job's store, all that wait add their answer to one key, and after a while it
reads that. So an inquiry costs each rank one request, and the one that asks a few, however many ranks there are.
Another may ask after REPEAT_S.

Who does not answer is named in a log line, with what its machine or its process says (bagua.job.presence); it may
compile, or save a checkpoint, and nothing is ended for that. A deadlock that two inquiries in a row have proven
(bagua.job.deadlock) becomes a verdict (bagua.job.verdicts), which every rank that waits reads.

[Note: keys] All below "bagua/waits/":
    inquiry    "number:rank" of the last one and who asks, changed by compare_set
    <number>   the answers, a line of JSON each
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bagua.job.deadlock import Post, deadlocked
from bagua.job.peer_watch import reach_any
from bagua.job.places import Place, places_of
from bagua.job.torch_internals import Store, add_line
from bagua.job.verdicts import Deadlocked, add_deadlocked
from bagua.job.waiting import Waiting
from bagua.rank_list import rank_list

ASK_S = 5.0  # of waiting, longer than collectives of a step take
REPEAT_S = 5.0  # after the last inquiry
ANSWER_S = 1.5  # for answers: longer than the job's thread takes to look again
NAME_S = 10.0  # of waiting
REACH_S = 1.0  # of each address
MAX_NAMED = 16

PREFIX = "bagua/waits"
INQUIRY, NO_INQUIRY = f"{PREFIX}/inquiry", "0:0"

_logger = logging.getLogger("bagua")


class LongWaits:
    """
    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen, self._seen_at = "", 0.0  # the last inquiry, which was answered
        self._asked = 0  # this rank's inquiry, until it is judged
        self._deadlocked: set[Deadlocked] = set()
        self._named: tuple[int, ...] = ()
        self._next = 0.0  # inquiry of this rank

    def look(self, client: Store, text: str, waits: Sequence[Waiting], now: float) -> None:
        """
        Args:
            text: of the inquiry, as it is in the store.
            waits: of this process.
            now: time.monotonic().
        """
        number = int(text.partition(":")[0])
        if text != self._seen:
            self._seen, self._seen_at = text, now
            if text != NO_INQUIRY:
                add_line(client, f"{PREFIX}/{number}", self._answer(waits))
        oldest = min((wait for wait in waits if wait.can_end), key=lambda wait: wait.since, default=None)
        if self._asked:
            if now - self._seen_at >= ANSWER_S:
                self._judge(client, oldest, now)
                self._asked = 0
        elif (
            oldest is not None and now - oldest.since >= ASK_S and now - self._seen_at >= REPEAT_S and now >= self._next
        ):
            mine = f"{number + 1}:{self._rank}"
            text = client.compare_set(INQUIRY, text, mine).decode()
            if text == mine:
                self._asked = number + 1
            self.look(client, text, waits, now)

    def _answer(self, waits: Iterable[Waiting]) -> str:
        posts: dict[str, Post] = {}
        for wait in sorted(waits, key=lambda wait: wait.since):
            if (post := wait.post()) is not None:
                posts.setdefault(*post)
        return json.dumps([self._rank, posts])

    def _judge(self, client: Store, wait: Waiting | None, now: float) -> None:
        key = f"{PREFIX}/{self._asked}"
        if not client.check([key]):  # this thread stood still, and others have asked since
            return
        lines = client.get(key).splitlines()
        answers: dict[int, dict[str, list[Any]]] = dict(map(json.loads, lines))
        by_group: dict[str, dict[int, Post]] = {}
        for rank, posts in answers.items():
            for group, post in posts.items():
                *parts, digests = post
                by_group.setdefault(group, {})[rank] = Post._make([*parts, tuple(digests)])
        found = {
            Deadlocked(group, rank, post.since)
            for group, posts in by_group.items()
            for rank, post in deadlocked(posts).items()
        }
        # Seen twice: each of them still waits for the same, and its threads run.
        for one in found & self._deadlocked:
            add_deadlocked(client, one)
        self._deadlocked = found
        with contextlib.suppress(Exception):  # not every store can
            client.delete_key(f"{PREFIX}/{self._asked - 1}")
        missing = [] if wait is None else [rank for rank in wait.ranks if rank not in answers]
        if wait is not None and now - wait.since >= NAME_S:
            self._name(client, wait, missing, now)
        if not missing and not found:
            self._next = now + 3 * REPEAT_S  # others may wait for ranks that this one does not wait for

    def _name(self, client: Store, wait: Waiting, missing: Sequence[int], now: float) -> None:
        before, self._named = self._named, tuple(missing)
        if not missing or self._named == before:
            return
        places = places_of(client, missing[:MAX_NAMED])
        since = f"Rank {self._rank} has waited {now - wait.since:.0f} s ({wait.what})"
        # Where many do not answer, that takes longer than others wait for this rank's answers.
        threading.Thread(target=_log_missing, args=(since, missing, places, wait.deadline), daemon=True).start()


def _log_missing(since: str, missing: Sequence[int], places: Mapping[int, Place], deadline: str) -> None:
    shown = missing[:MAX_NAMED]
    with ThreadPoolExecutor(len(shown)) as pool:
        told = pool.map(lambda rank: _told(rank, places.get(rank)), shown)
        more = f"; and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        _logger.warning(f"{since}. Not in it: {'; '.join(told)}{more}.\nThe job goes on when they come, {deadline}.")


def _told(rank: int, place: Place | None) -> str:
    if place is None:
        return f"rank {rank}: it has made no Bagua group"
    _, answer = reach_any(place.door, REACH_S)
    if answer.connection is not None:
        answer.connection.close()
    state = {
        "here": answer.doing or "it is in no collective",
        "mute": "its machine answers, its process does not: it is stopped, or Python is busy",
    }.get(answer.state, "its machine or process does not answer")
    return f"{rank_list([rank], {rank: place.host})}: {state}"
