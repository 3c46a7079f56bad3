"""A process that joins follows the steps of the others, until it is only a step or two behind: they stop for it then,
and not for as long as all of the state takes.

[Note: following] Each member gives a share of the parameters over a connection of its own: the process asks for it by
{"secret", "follow": {"epoch", "share", "of"}}, and gets records, in the order of the steps. Each is announced
by {"bytes", "sizes", "crc", "waiting"}: of a pickled tuple, which follows, and of tensors, which follow that. Tuples:
    ("begin", step)                   how many steps of optimizers are done
    ("state", model, ...)             of the model of this number, as bagua.engine.state_feed says
    ("gradients", model, ...)         likewise; with which an optimizer is about to step
    ("end", optimizer, has_stepped)   of a step of the optimizer of this number; it may have left it out, because of
                                      infinities
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
from typing import Any, Protocol

import torch

from bagua.regroup.transfer import MAX_TEXT, bytes_of, receive_into, receive_message, send_message

# Records of a member that have not been sent, when a process that joins counts as having caught up: of one step, per
# optimizer.
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
    """Of the records of a share of a model: bagua.engine.state_feed.StateFeed. Without the model's number."""

    limit_bytes: int

    def begin_step(self) -> Iterator[Record]:
        """Copies of parameters."""

    def gradients(self, optimizer: torch.optim.Optimizer) -> Record | None:
        """With which it is about to step. None: it is no optimizer of the model."""

    @property
    def is_complete(self) -> bool:
        """Whether all of the share has been copied."""


class Feeder(Protocol):
    """A wrapped model: bagua.regroup.job_step.Participant."""

    def feed(self, share: int, of: int) -> Source:
        """What a process follows."""


class Follower(Protocol):
    """A model of this process, which joins: bagua.engine.state_feed.StateFollower."""

    def room(self, said: tuple[Any, ...]) -> list[torch.Tensor]:
        """For the tensors of a record."""

    def take(self, said: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """A record."""

    def set_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Those of the last records, if it is an optimizer of the model."""

    def forget_gradients(self) -> None:
        """It has stepped."""


class Followers:
    """All models of this process, which joins."""

    def __init__(self, models: Sequence[Follower], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models, self._optimizers = models, optimizers

    @property
    def optimizer_count(self) -> int:
        return len(self._optimizers)

    def room(self, said: tuple[Any, ...]) -> list[torch.Tensor]:
        """For the tensors of a record."""
        kind, model, *rest = said
        tensors: list[torch.Tensor] = self._models[model].room((kind, *rest))
        return tensors

    def take(self, said: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """A record."""
        kind, model, *rest = said
        self._models[model].take((kind, *rest), tensors)

    def step(self, number: int) -> None:
        """By the optimizer of this number, with the gradients of the last records."""
        optimizer = self._optimizers[number]
        for one in self._models:
            one.set_gradients(optimizer)
        try:
            optimizer.step()
        finally:
            for one in self._models:
                one.forget_gradients()


@dataclass
class Feed:
    """What one process that joins gets of this member. Filled on the training thread, and sent on a thread of the
    connection."""

    share: int
    of: int
    is_over: bool = False
    _sources: Sequence[Source] = ()
    _optimizers: Sequence[torch.optim.Optimizer] = ()
    _pending: Sequence[Record] = ()
    _waiting: int = 0  # bytes
    _waiting_steps: int = 0
    _is_complete_told: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards both numbers
    _records: queue.SimpleQueue[Record | None] = field(default_factory=queue.SimpleQueue)

    # --- on the training thread --------------------------------------------------------------------------------------

    def begin_step(self, step: int, models: Sequence[Feeder], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Before a step of the job, of so many that are done."""
        if not self._sources:
            self._sources = [one.feed(self.share, self.of) for one in models]
            self._optimizers = optimizers
            self._put(Record(("begin", step * len(optimizers))))
        for model, source in enumerate(self._sources):
            if not source.is_complete:
                for record in source.begin_step():
                    self._put(_of_model(model, record))
                break
        if not self._is_complete_told and all(one.is_complete for one in self._sources):
            self._is_complete_told = True
            self._put(Record(("complete",)))
        if self._waiting > sum(one.limit_bytes for one in self._sources) or self._waiting_steps > MAX_STEPS:
            _logger.warning(
                f"A process that joins is too slow to follow: {self._waiting >> 20} MiB of {self._waiting_steps} steps"
                " wait for it. It will take the state while the others wait."
            )
            self.end()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step."""
        records = [(model, source.gradients(optimizer)) for model, source in enumerate(self._sources)]
        self._pending = [_of_model(model, record) for model, record in records if record is not None]

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped, or does not in this step."""
        if self._sources:
            for record in self._pending:
                self._put(record)
            number = next(number for number, one in enumerate(self._optimizers) if one is optimizer)
            self._put(Record(("end", number, bool(self._pending))))
            self._pending = ()

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


def _of_model(number: int, record: Record) -> Record:
    kind, *rest = record.said
    return Record((kind, number, *rest), record.tensors, record.wait)


class Following:
    """By a process that joins, on its training thread; one thread more for each connection.

    Args:
        connections: to all members, by their shares; closed by whoever has made them.
    """

    def __init__(self, connections: Sequence[socket.socket], followers: Followers) -> None:
        self._shares = [_Share(one, followers) for one in connections]
        self._followers = followers
        self.steps = 0  # of optimizers, that were followed

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
                    ends = list(pool.map(_Share.read_step, in_step))
                    if None in ends:
                        # Others may not have come as far as "begin" before that.
                        return set(ends) == {None} and len(in_step) == len(self._shares)
                    for number in {number for number, has_stepped in filter(None, ends) if has_stepped}:
                        self._followers.step(number)
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
    def __init__(self, connection: socket.socket, followers: Followers) -> None:
        self._connection, self._followers = connection, followers
        self._is_complete = False
        self._waiting = 0
        self.step = 0

    @property
    def has_caught_up(self) -> bool:
        return self._is_complete and self._waiting <= FEW * self._followers.optimizer_count

    def wait(self, tick: Callable[[], None]) -> None:
        """Until something comes."""
        while not select.select([self._connection], [], [], TICK_S)[0]:
            tick()

    def begin(self) -> None:
        kind, *rest = self._read()
        if kind != "begin":
            raise ConnectionError(f"a record {kind} came instead of the first one")
        (self.step,) = rest

    def read_step(self) -> tuple[int, bool] | None:
        """All that belongs to a step of an optimizer.

        Returns:
            the number of that optimizer, and whether it has stepped. None: this process is admitted.
        """
        while True:
            kind, *rest = self._read()
            if kind == "end":
                self.step += 1
                number, has_stepped = rest
                return number, has_stepped
            if kind == "admitted":
                return None
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
            tensors = self._followers.room(record)
            if [one.nbytes for one in tensors] != said["sizes"]:
                raise ConnectionError("a record has other sizes than this process has made room for")
            for one, expected in zip(tensors, checksums, strict=True):
                memory = bytes_of(one)
                receive_into(self._connection, memory)
                if zlib.crc32(memory) != expected:
                    raise ConnectionError("the checksum of a record is wrong")
            self._followers.take(record, tensors)
        return record
