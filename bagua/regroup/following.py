"""A process that joins follows the steps of the others, until it is only a step or two behind: they stop for it then,
and not for as long as all of the state takes.

[Note: following] Each member gives a share of the parameters over a connection of its own: the process asks for it by
{"secret", "follow": {"epoch", "share", "of"}}, and gets records, in the order of the steps. Each is announced
by {"bytes", "sizes", "crc", "waiting"}: of a pickled tuple, which follows, and of tensors, which follow that. Tuples:
    ("begin", step)                   the number of steps that are done
    ("state", ...), ("gradients", ..) as bagua.engine.state_feed says; gradients of a step that is about to be done
    ("end", has_stepped)              of a step; the optimizer may have left it out, because of infinities
    ("complete",)                     all parameters of the share have been copied
    ("admitted",)                     the epoch is over, and the next one has the process
A connection that closes otherwise ends the following: the process takes all of the state then, while the others wait.

What is followed is compared at the end (bagua.regroup.transfer): programs may change parameters between two steps, too.
"""

from __future__ import annotations

import logging
import pickle
import queue
import select
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from bagua.regroup.transfer import MAX_TEXT, bytes_of, receive_into, receive_message, send_message

if TYPE_CHECKING:
    import torch

# Records of a member that have not been sent, when a process that joins counts as having caught up: of one step.
FEW = 2
MAX_STEPS = 64  # that have not been sent; then it does not catch up
TICK_S = 0.25

_logger = logging.getLogger("bagua")


@dataclass(frozen=True)
class Record:
    """
    said: what it is; its first item is the kind.
    tensors: contiguous, on the CPU; of nobody else.
    wait: until they are there, from a GPU; None: they are.
    """

    said: tuple[Any, ...]
    tensors: Sequence[torch.Tensor] = ()
    wait: Callable[[], object] | None = None

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)


class Source(Protocol):
    """Of the records of a share: bagua.engine.state_feed.StateFeed."""

    limit_bytes: int

    def begin_step(self) -> Iterator[Record]:
        """Copies of parameters."""

    def gradients(self) -> Record:
        """Of the step that is about to be done."""

    @property
    def is_complete(self) -> bool:
        """Whether all of the share has been copied."""


class Follower(Protocol):
    """Of this process, which joins: bagua.engine.state_feed.StateFollower."""

    def room(self, said: tuple[Any, ...]) -> list[torch.Tensor]:
        """For the tensors of a record."""

    def take(self, said: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """A record."""

    def step(self) -> None:
        """With the gradients of the last records."""


@dataclass
class Feed:
    """What one process that joins gets of this member. Filled on the training thread, and sent on a thread of the
    connection."""

    share: int
    of: int
    is_over: bool = False
    _source: Source | None = None
    _pending: Record | None = None
    _waiting: int = 0  # bytes
    _waiting_steps: int = 0
    _is_complete_told: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards both numbers
    _records: queue.SimpleQueue[Record | None] = field(default_factory=queue.SimpleQueue)

    # --- on the training thread --------------------------------------------------------------------------------------

    def begin_step(self, step: int, source: Callable[[int, int], Source]) -> None:
        """Before a step."""
        if self._source is None:
            self._source = source(self.share, self.of)
            self._put(Record(("begin", step)))
        for record in self._source.begin_step():
            self._put(record)
        if self._source.is_complete and not self._is_complete_told:
            self._is_complete_told = True
            self._put(Record(("complete",)))
        if self._waiting > self._source.limit_bytes or self._waiting_steps > MAX_STEPS:
            _logger.warning(
                f"A process that joins is too slow to follow: {self._waiting >> 20} MiB of {self._waiting_steps} steps"
                " wait for it. It will take the state while the others wait."
            )
            self.end()

    def before_step(self) -> None:
        """The optimizer is about to step."""
        self._pending = None if self._source is None else self._source.gradients()

    def end_step(self) -> None:
        """It has stepped, or does not in this step."""
        if self._source is not None:
            if self._pending is not None:
                self._put(self._pending)
            self._put(Record(("end", self._pending is not None)))
            self._pending = None

    def end(self, *last: Record) -> None:
        """Nothing more comes but this."""
        self.is_over = True
        for record in (*last, None):
            self._records.put(record)

    def _put(self, record: Record) -> None:
        with self._lock:
            self._waiting += record.nbytes
            self._waiting_steps += record.said[0] == "end"
        self._records.put(record)

    # --- on the connection's thread ----------------------------------------------------------------------------------

    def send_to(self, connection: socket.socket) -> None:
        try:
            while (record := self._records.get()) is not None:
                if record.wait is not None:
                    record.wait()
                text, views = pickle.dumps(record.said), [bytes_of(one) for one in record.tensors]
                crc = [zlib.crc32(text), *(zlib.crc32(one) for one in views)]
                said = {"sizes": [len(one) for one in views], "crc": crc, "waiting": self._records.qsize()}
                send_message(connection, said, text)
                for one in views:
                    connection.sendall(one)
                with self._lock:
                    self._waiting -= record.nbytes
                    self._waiting_steps -= record.said[0] == "end"
        finally:
            self.is_over = True


class Following:
    """By a process that joins, on its training thread; one thread more for each connection.

    Args:
        connections: to all members, by their shares; closed by whoever has made them.
        follower: what is done with records.
    """

    def __init__(self, connections: Sequence[socket.socket], follower: Follower) -> None:
        self._shares = [_Share(one, follower) for one in connections]
        self._follower = follower
        self.steps = 0  # that were followed

    def run(self, on_caught_up: Callable[[], None], on_step: Callable[[int], None], tick: Callable[[], None]) -> bool:
        """
        Args:
            on_caught_up: is called once.
            on_step: is called after each step with their number.
            tick: from time to time while nothing comes; raises at the deadline.

        Returns:
            whether the members have admitted this process, which has followed them so far.
        """
        is_told = False
        try:
            with ThreadPoolExecutor(len(self._shares)) as pool:
                for one in self._shares:
                    one.wait(tick)
                list(pool.map(_Share.begin, self._shares))
                step = min(one.step for one in self._shares)
                while True:
                    in_step = [one for one in self._shares if one.step == step]
                    for one in in_step:
                        one.wait(tick)
                    kinds = list(pool.map(_Share.read_step, in_step))
                    if "admitted" in kinds:
                        # Others may not have come as far as "begin" before that.
                        return set(kinds) == {"admitted"} and len(in_step) == len(self._shares)
                    if "stepped" in kinds:
                        self._follower.step()
                    step += 1
                    self.steps += 1
                    on_step(self.steps)
                    if not is_told and all(one.has_caught_up for one in self._shares):
                        is_told = True
                        on_caught_up()
        except OSError as error:
            _logger.info(f"This process does not follow the job any more ({error}).")
            return False


class _Share:
    def __init__(self, connection: socket.socket, follower: Follower) -> None:
        self._connection, self._follower = connection, follower
        self._is_complete = False
        self._waiting = 0
        self.step = 0

    @property
    def has_caught_up(self) -> bool:
        return self._is_complete and self._waiting <= FEW

    def wait(self, tick: Callable[[], None]) -> None:
        """Until something comes."""
        while not select.select([self._connection], [], [], TICK_S)[0]:
            tick()

    def begin(self) -> None:
        kind, *rest = self._read()
        if kind != "begin":
            raise ConnectionError(f"a record {kind} came instead of the first one")
        (self.step,) = rest

    def read_step(self) -> str:
        """All that belongs to a step. Returns what became of it."""
        while True:
            kind, *rest = self._read()
            if kind == "end":
                self.step += 1
                return "stepped" if rest[0] else "left out"
            if kind == "admitted":
                return "admitted"
            if kind == "complete":
                self._is_complete = True

    def _read(self) -> tuple[Any, ...]:
        said = receive_message(self._connection)
        if said["bytes"] > MAX_TEXT:
            raise ConnectionError(f"a record of {said['bytes']} bytes was announced")
        text = bytearray(said["bytes"])
        receive_into(self._connection, memoryview(text))
        self._waiting = said["waiting"]
        crc, *checksums = said["crc"]
        if zlib.crc32(text) != crc:
            raise ConnectionError("the checksum of a record is wrong")
        record: tuple[Any, ...] = pickle.loads(text)
        if record[0] in ("state", "gradients"):
            tensors = self._follower.room(record)
            if [one.nbytes for one in tensors] != said["sizes"]:
                raise ConnectionError("a record has other sizes than this process has made room for")
            for one, expected in zip(tensors, checksums, strict=True):
                memory = bytes_of(one)
                receive_into(self._connection, memory)
                if zlib.crc32(memory) != expected:
                    raise ConnectionError("the checksum of a record is wrong")
            self._follower.take(record, tensors)
        return record
