"""Proves that ranks run different code: each waits for an operation that another one cannot begin. Pure functions, and
what they read.

Each rank counts the operations that it begins in a group, in an `OperationOrder`: what the engine does together with
the other ranks, the collectives of a communicator, and the making of groups. A rank that waits says which operation
its thread waits for, and how far it has come in all orders (`Answer`).

[Note: proof] A thread waits for another one if that has not begun the operation and is to begin it: it began the
order's last operation, or made the order. Where such threads are in a circle, none of them ever begins what the one
before it waits for. In a healthy job the operations of the threads that belong together have an order over all groups,
the same on all ranks. Of the threads in a circle, take the one whose operation comes first in that order: the others
are at a later one, so that each of them has begun it, and the one waits for none of them. So there is no circle in a
healthy job, however slow it is. For the same reason the answers need not be of the same moment.

Collectives of a communicator are matched by position alone. If a rank waits for one, and another rank has begun a
different one at that position (another size is enough), that wait cannot end rightly, even if the other rank is through
with its own: the two are a circle. In a healthy job, names at a position do not differ.

A rank that is late is in no wait, or has begun all that others wait for; one that says nothing is in no circle.

Examples: rank 0 alone saves a checkpoint, and the others sum gradients. Rank 0 alone freezes a layer, and compares its
plan with the others', which sum gradients.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import NamedTuple

LOG_LENGTH = 16  # operations; ranks are at most a few apart
SHORT_LOG = 4  # of an order in which a rank waits for nothing
# Before the names of orders that are in every process from the start. Who says nothing of one has begun nothing in it.
EVERYWHERE = "everywhere/"
# Behind the names of orders of what the engine does: not all of it communicates on each rank.
ENGINE = "/engine"
MAIN_THREAD = 0

# On all ranks the same: a name, or one with the number of elements, if that is the same, and the dtype of a tensor.
Operation = str | tuple[str, int | None, object]


def told(operation: Operation) -> str:
    """For users."""
    if isinstance(operation, str):
        return operation
    what, size, dtype = operation
    of = "" if size is None else f"{size} "
    return f"{what} of {of}{str(dtype).removeprefix('torch.')}"


class Log(NamedTuple):
    """How far a rank has come in an order.

    Attributes:
        begun: how many operations.
        done: the position of the last one that was waited for.
        thread: that is to begin the next one, by its number in the answer.
        digests: of the names of the last ones.
    """

    begun: int
    done: int
    thread: int
    digests: tuple[int, ...]

    @property
    def first(self) -> int:
        """The position that the first digest is of."""
        return self.begun - len(self.digests) + 1


_NOTHING = Log(0, 0, MAIN_THREAD, ())


class Wait(NamedTuple):
    """
    Attributes:
        thread: that waits, by its number in the answer.
        since: when the thread's wait began, which tells waits of a rank apart.
        what: the thread does, in words of the user where they are known.
        order, position: of the operation that it waits for, counted from 1.
        can_give_up: only other ranks can delay it, and it is ended if ranks are deadlocked in this order.
        ranks: global ones that take part, as (first, last).
    """

    thread: int
    since: float
    what: str
    order: str
    position: int
    can_give_up: bool
    ranks: tuple[tuple[int, int], ...]


class Answer(NamedTuple):
    """What a rank says. Threads have numbers; that of the main thread is MAIN_THREAD.

    Attributes:
        is_waiting: a thread waits, for whatever. What GPUs wait for is not known.
        logs: by order.
    """

    waits: Sequence[Wait]
    logs: Mapping[str, Log]
    is_waiting: bool

    def log_of(self, order: str) -> Log | None:
        """None: nothing is known."""
        return self.logs.get(order, _NOTHING if order.startswith(EVERYWHERE) else None)


class WaitingThread(NamedTuple):
    """Of a rank, during one wait."""

    rank: int
    since: float


class OperationOrder:
    """Operations that all members begin in the same order. Of this process; one thread at a time.

    Args:
        name: the same on all ranks.

    Attributes:
        begun: how many operations.
        done: the position of the last one that was waited for.
        thread: that began the last one, or made this.
    """

    __slots__ = ("__weakref__", "_names", "begun", "done", "name", "thread")

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = self.done = 0
        self.thread = get_ident()
        self._names: deque[Operation] = deque(maxlen=LOG_LENGTH)

    def begin(self, what: Operation) -> int:
        """Another operation, of the same name on all ranks. Returns its position."""
        self._names.append(what)
        self.thread = get_ident()
        self.begun += 1
        return self.begun

    def log(self, thread: int, length: int) -> Log:
        """As others may know it."""
        names = list(self._names)[-length:]
        return Log(self.begun, self.done, thread, tuple(zlib.crc32(told(name).encode()) for name in names))


def ranges_of(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """As (first, last)."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return tuple(ranges)


def is_in(rank: int, ranges: Iterable[Sequence[int]]) -> bool:
    """Whether one of the ranges (first, last) has the rank."""
    return any(first <= rank <= last for first, last in ranges)


class _Waiters(NamedTuple):
    """Those that wait for the same operation, with the same behind them. A node of the graph: a thousand ranks that
    wait for a thousand others would be a million edges."""

    order: str
    position: int
    ranks: tuple[tuple[int, int], ...]
    log: Log

    @property
    def is_collective(self) -> bool:
        """Whether the backend matches the operations of the order by their position alone."""
        return "/" in self.order and not self.order.startswith(EVERYWHERE) and not self.order.endswith(ENGINE)


_Node = WaitingThread | tuple[_Waiters, Log]
_Graph = Mapping[_Node, set[_Node]]


def circles(answers: Mapping[int, Answer]) -> Iterator[set[WaitingThread]]:
    """The threads that wait for each other in a circle: each set by itself. See [Note: proof]."""
    forward = _graph(answers)
    backward: defaultdict[_Node, set[_Node]] = defaultdict(set)
    for one, others in forward.items():
        for other in others:
            backward[other].add(one)
    left = {node for node in forward if isinstance(node, WaitingThread)}
    while left:
        node = min(left)
        circle = {one for one in _reached(forward, node) & _reached(backward, node) if isinstance(one, WaitingThread)}
        left -= circle | {node}
        if circle:
            yield circle


def answers_of(threads: Container[WaitingThread], answers: Mapping[int, Answer]) -> dict[int, Answer]:
    """What is left of the answers if only these threads wait."""
    return {
        rank: answer._replace(waits=[wait for wait in answer.waits if WaitingThread(rank, wait.since) in threads])
        for rank, answer in answers.items()
    }


def have_to_give_up(answers: Mapping[int, Answer]) -> Iterator[tuple[int, Wait]]:
    """Those that can, of the waits of two ranks for different operations of one order."""
    by_order: defaultdict[str, list[tuple[int, Wait]]] = defaultdict(list)
    for rank, answer in answers.items():
        for wait in answer.waits:
            by_order[wait.order].append((rank, wait))
    for order, waiting in by_order.items():
        # Few, however many ranks there are.
        states = {(wait.position, answers[rank].logs[order]) for rank, wait in waiting}
        for rank, wait in waiting:
            log = answers[rank].logs[order]
            if wait.can_give_up and any(
                has_not_begun(log, wait.position, other) and has_not_begun(other, position, log)
                for position, other in states
            ):
                yield rank, wait


def is_elsewhere(answers: Mapping[int, Answer], rank: int, waiting: int) -> bool:
    """Whether the rank has not begun what the waiting one waits for, and waits for nothing itself."""
    answer, own = answers[rank], answers.get(waiting)
    return (
        own is not None
        and not answer.is_waiting
        and any(
            is_in(rank, wait.ranks)
            and (log := answer.log_of(wait.order)) is not None
            and has_not_begun(own.logs[wait.order], wait.position, log)
            for wait in own.waits
        )
    )


def has_not_begun(one: Log, position: int, other: Log) -> bool:
    """Whether it is proven that the other has not begun the operation which the one waits for, or another instead."""
    begin, end = max(one.first, other.first), min(one.begun, other.begun)
    difference = next(
        (at for at in range(begin, end + 1) if one.digests[at - one.first] != other.digests[at - other.first]), None
    )
    if difference is not None:
        # What was before is the same; or, if that is not known any more, it need not be.
        is_first = difference > begin or begin == 1
        return is_first and max(one.done, other.done) < difference <= position
    is_common = end >= begin or other.begun == 0
    return is_common and other.begun < position


def is_mixed_up(one: Log, position: int, other: Log) -> bool:
    """Whether it is proven that the other has begun another operation in the place of this one, done or not."""
    first, last = max(one.first, other.first), min(one.begun, other.begun)
    if not (first < position or position == 1) or not first <= position <= last:
        return False
    same = [one.digests[at - one.first] == other.digests[at - other.first] for at in range(first, position + 1)]
    return all(same[:-1]) and not same[-1]


def _graph(answers: Mapping[int, Answer]) -> _Graph:
    """Who waits for whom."""
    waiters: defaultdict[_Waiters, list[WaitingThread]] = defaultdict(list)
    by_thread: defaultdict[tuple[int, int], set[WaitingThread]] = defaultdict(set)
    for rank, answer in answers.items():
        for wait in answer.waits:
            thread = WaitingThread(rank, wait.since)
            by_thread[rank, wait.thread].add(thread)
            waiters[_Waiters(wait.order, wait.position, wait.ranks, answer.logs[wait.order])].append(thread)
    graph: defaultdict[_Node, set[_Node]] = defaultdict(set)
    members: dict[tuple[str, tuple[tuple[int, int], ...]], dict[Log, list[int]]] = {}
    for kind, threads in waiters.items():
        if (key := (kind.order, kind.ranks)) not in members:
            members[key] = _by_log(answers, *key)
        for log, ranks in members[key].items():
            others = {thread for rank in ranks for thread in by_thread.get((rank, log.thread), ())}
            if others and has_not_begun(kind.log, kind.position, log):
                graph[kind, log].update(others)
                for one in threads:
                    graph[one].add((kind, log))
            elif others and kind.is_collective and is_mixed_up(kind.log, kind.position, log):
                graph[kind, log].update(others)
                graph[kind, kind.log].update(threads)
                for one in threads:
                    graph[one].add((kind, log))
                for one in others:
                    graph[one].add((kind, kind.log))
    return graph


def _by_log(answers: Mapping[int, Answer], order: str, ranges: Sequence[tuple[int, int]]) -> dict[Log, list[int]]:
    """Those that have answered, of these ranks, by what they say of the order."""
    found: dict[Log, list[int]] = {}
    for rank, answer in answers.items():
        if is_in(rank, ranges) and (log := answer.log_of(order)) is not None:
            found.setdefault(log, []).append(rank)
    return found


def _reached(graph: _Graph, start: _Node) -> set[_Node]:
    """On a way of one edge or more."""
    found: set[_Node] = set()
    left = [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found
