"""What ranks that wait for long find out together: who does not take part, and whether they run different code.

Owned by the job's thread (bagua.job.job_thread), which calls it as long as this process waits. One rank asks for all:
it raises the number of the inquiry in the job's store, all that wait add their answer to one key, and after a while it
reads that. So an inquiry costs each rank one request, and the one that asks a few, however many ranks there are.
Another may ask after REPEAT_S.

Who does not answer is named in a log line, with what its machine or its process says (bagua.job.presence); it may
compile, or save a checkpoint, and nothing is ended for that. Ranks of which two inquiries in a row have proven that
they run different code (bagua.job.deadlock) are named in a log line of each of them. If they wait for different
operations of one group, waits that can be given up end. All this goes by verdicts (bagua.job.verdicts), which every
rank that waits reads.

[Note: keys] All below "bagua/waits/":
    inquiry    "number:rank" of the last one and who asks, changed by compare_set
    <number>   the answers, a line of JSON each: [rank, `Answer`]
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bagua.job import computing
from bagua.job.deadlock import (
    EVERYWHERE,
    Answer,
    Log,
    Wait,
    WaitingThread,
    answers_of,
    circles,
    have_to_give_up,
    is_elsewhere,
    is_in,
    ranges_of,
)
from bagua.job.peer_watch import reach_any
from bagua.job.places import Place, places_of
from bagua.job.torch_internals import Store, add_line
from bagua.job.verdicts import Deadlocked, Different, add_deadlocked, add_different
from bagua.job.waiting import Waiting, doing_of, outermost
from bagua.rank_list import rank_list

ASK_S = 5.0  # of waiting, longer than collectives of a step take
REPEAT_S = 5.0  # after the last inquiry
ANSWER_S = 1.5  # for answers: longer than the job's thread takes to look again
NAME_S = 10.0  # of waiting
REACH_S = 1.0  # of each address
MAX_NAMED = 16
MAX_SIDES = 8

PREFIX = "bagua/waits"
INQUIRY, NO_INQUIRY = f"{PREFIX}/inquiry", "0:0"

_logger = logging.getLogger("bagua")


class LongWaits:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen, self._seen_at = "", 0.0  # the last inquiry, which was answered
        self._asked = 0  # this rank's inquiry, until it is judged
        self._deadlocked: set[Deadlocked] = set()
        self._in_circles: set[WaitingThread] = set()
        self._is_new = False  # something was found that is to be found again
        self._verdicts: set[Different] = set()  # that are in the store
        self._told = 0.0  # since when the wait began that was last told to the user
        self._named: tuple[int, ...] = ()
        self._next = 0.0  # inquiry of this rank

    def look(
        self, client: Store, text: str, answer: Callable[[], Answer], waits: Sequence[Waiting], now: float
    ) -> None:
        """
        Args:
            text: of the inquiry, as it is in the store.
            answer: what this process says of itself.
            now: time.monotonic().
        """
        number = int(text.partition(":")[0])
        if text != self._seen:
            self._seen, self._seen_at = text, now
            if text != NO_INQUIRY:
                add_line(client, f"{PREFIX}/{number}", json.dumps([self._rank, answer()]))
        oldest = min((wait for wait in waits if wait.is_of_a_thread), key=lambda wait: wait.since, default=None)
        # What was found is confirmed before another rank asks.
        pause = 0.0 if self._is_new else REPEAT_S
        if self._asked:
            if now - self._seen_at >= ANSWER_S:
                self._judge(client, oldest, now)
                self._asked = 0
        elif oldest is not None and now - oldest.since >= ASK_S and now - self._seen_at >= pause and now >= self._next:
            mine = f"{number + 1}:{self._rank}"
            text = client.compare_set(INQUIRY, text, mine).decode()
            if text == mine:
                self._asked = number + 1
            self.look(client, text, answer, waits, now)

    def note(self, verdict: Different, waits: Sequence[Waiting]) -> None:
        """Tells the user, if a thread of this process is meant, and it still waits."""
        self._verdicts.add(verdict)
        mine = {what for what, ranges in verdict.sides if is_in(self._rank, ranges)}
        for wait in outermost(waits).values():
            if any(what.startswith(doing_of(wait)) for what in mine) and wait.since != self._told:
                self._told = wait.since
                _logger.warning(_difference(verdict, wait.timeout_s))

    def _judge(self, client: Store, wait: Waiting | None, now: float) -> None:
        key = f"{PREFIX}/{self._asked}"
        self._is_new = False
        if not client.check([key]):  # this thread stood still, and others have asked since
            return
        answers = dict(map(_answer_in, client.get(key).splitlines()))
        found = {Deadlocked(given_up.order, rank, given_up.since) for rank, given_up in have_to_give_up(answers)}
        # Seen twice: each of them still waits for the same, and its threads run.
        proven = found & self._deadlocked
        for one in proven:
            add_deadlocked(client, one)
        threads = self._judge_circles(client, answers, found)
        self._is_new |= bool(found - self._deadlocked)
        self._deadlocked, self._in_circles = found, threads
        with contextlib.suppress(Exception):  # not every store can
            client.delete_key(f"{PREFIX}/{self._asked - 1}")
        missing = [
            rank
            for rank in (() if wait is None else wait.ranks)
            if rank not in answers or is_elsewhere(answers, rank, self._rank)
        ]
        if wait is not None and now - wait.since >= NAME_S:
            self._name(client, wait, missing, now)
        if not missing and not found and not self._is_new:
            self._next = now + 3 * REPEAT_S  # others may wait for ranks that this one does not wait for

    def _judge_circles(
        self, client: Store, answers: Mapping[int, Answer], given_up: set[Deadlocked]
    ) -> set[WaitingThread]:
        """The threads that wait in circles. Circles of those that were in one before, too, are told."""
        threads = set().union(*circles(answers))
        told: set[WaitingThread] = set()
        ends = {WaitingThread(one.rank, one.since) for one in given_up}
        for circle in circles(answers_of(self._in_circles, answers)):
            told |= circle
            verdict = _verdict(answers, circle)
            if not circle & ends and verdict not in self._verdicts:  # their errors say more
                self._verdicts.add(verdict)
                add_different(client, verdict)
        self._is_new = threads > told
        return threads

    def _name(self, client: Store, wait: Waiting, missing: Sequence[int], now: float) -> None:
        before, self._named = self._named, tuple(missing)
        if not missing or self._named == before:
            return
        places = places_of(client, missing[:MAX_NAMED])
        since = f"Rank {self._rank} has waited {now - wait.since:.0f} s ({wait.what})"
        # Where many do not answer, that takes longer than others wait for this rank's answers.
        threading.Thread(target=_log_missing, args=(since, missing, places, wait.timeout_s), daemon=True).start()


def _log_missing(since: str, missing: Sequence[int], places: Mapping[int, Place], timeout_s: float) -> None:
    shown = missing[:MAX_NAMED]
    with ThreadPoolExecutor(len(shown)) as pool:
        told = pool.map(lambda rank: _told(rank, places.get(rank)), shown)
        more = f"; and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        _logger.warning(
            f"{since}. Not in it: {'; '.join(told)}{more}.\nThe job goes on when they come, {_within(timeout_s)}."
        )


def _told(rank: int, place: Place | None) -> str:
    if place is None:
        return f"rank {rank}: it has made no Bagua group"
    _, answer = reach_any(place.door, REACH_S)
    if answer.connection is not None:
        answer.connection.close()
    state = {
        "here": (answer.doing or "it is in no collective") + _slowness(answer.computing),
        "mute": "its machine answers, its process does not: it is stopped, or Python is busy",
    }.get(answer.state, "its machine or process does not answer")
    return f"{rank_list([rank], {rank: place.host})}: {state}"


def _slowness(theirs: computing.Computing) -> str:
    ratio = computing.slower_by(theirs, computing.own())
    return "" if ratio is None else f", and is {computing.slower_text(ratio)}"


def _within(timeout_s: float) -> str:
    return f"within the group's timeout of {timeout_s:g} s"


def _answer_in(line: bytes) -> tuple[int, Answer]:
    rank, (waits, logs, is_waiting) = json.loads(line)
    by_order = {name: _log_in(*one) for name, one in logs.items()}
    return rank, Answer([_wait_in(*one) for one in waits], by_order, is_waiting)


def _wait_in(*said: Any) -> Wait:
    *fields, ranges = said
    return Wait._make([*fields, tuple(map(tuple, ranges))])


def _log_in(*said: Any) -> Log:
    *fields, digests = said
    return Log._make([*fields, tuple(digests)])


def _verdict(answers: Mapping[int, Answer], circle: set[WaitingThread]) -> Different:
    """Of threads that wait in a circle."""
    waits = {thread: wait for thread in circle for wait in answers[thread.rank].waits if wait.since == thread.since}
    are_alike = len({wait.what for wait in waits.values()}) == 1
    sides: defaultdict[str, list[int]] = defaultdict(list)
    for thread in sorted(circle):
        wait = waits[thread]
        name = "" if wait.order.startswith(EVERYWHERE) else f"group {wait.order.partition('/')[0]}, "
        where = f" ({name}{rank_list(_listed(wait.ranks))})" if are_alike else ""
        sides[wait.what + where].append(thread.rank)
    return Different(*min(circle), tuple((what, ranges_of(ranks)) for what, ranks in sides.items()))


def _difference(verdict: Different, timeout_s: float) -> str:
    """For the log."""
    sides: list[str] = []
    for what, ranges in verdict.sides[:MAX_SIDES]:
        ranks = _listed(ranges)
        verb = "" if sides else "waits " if len(ranks) == 1 else "wait "
        sides.append(f"{rank_list(ranks)} {verb}in {what}")
    more = f", and more in {len(verdict.sides) - MAX_SIDES} others" if len(verdict.sides) > MAX_SIDES else ""
    return (
        f"R{', '.join(sides)[1:]}{more}: the ranks run different code.\n"
        "None of them comes to what another one waits for. Make the same calls on all ranks, with tensors of the same"
        " dtype and size: look for `if rank == 0` around a collective, a backward pass or a checkpoint, and give all"
        " ranks equal numbers of batches.\n"
        f"The ranks go on waiting, {_within(timeout_s)}."
    )


def _listed(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [rank for first, last in ranges for rank in range(first, last + 1)]
