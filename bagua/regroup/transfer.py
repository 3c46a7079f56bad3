"""The state of a job, on its way to a process that joins: from all other members at once, over several connections, in
pieces with a checksum.

A process serves its state by `StateServer`: a thread that accepts, and one for each connection. A process that joins
takes it by `Fetch`, with a thread for each connection that it makes. Bytes are read from and written to the tensors'
own memory. Where that is a GPU's, pieces go through the host's, and checksums are made on the GPU.

[Note: messages] The length of a text, four bytes, then the text: a JSON object. If that has "bytes", so many follow it.
    {"secret", "join": {...}}     what `StateServer.on_join` is given; the answer is what it returns. {"ready": true}
                                  follows. The connection is open as long as the process wants to join
    {"secret", "follow": {...}}   answered by records (bagua.regroup.following), on a thread of `StateServer.on_follow`
    {"secret", "state": step}     answered, once there is an offer for this step, by {"sizes", "layout", "bytes"} and
                                  the description; then {"piece": [tensor, begin, end]} by {"crc", "bytes"} and these,
                                  and {"sums": [tensors]} by {"sums"}
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bagua.job.presence import listen, own_addresses

PIECE_BYTES = 8 << 20
COMPARE = -1  # in place of a piece's begin
CONNECTIONS = 2  # to each member
MAX_CONNECTIONS = 16  # of a process that joins
CONNECT_S = 10.0
# Without a byte; those that are served wait for an offer, and so are not silent for long once there is one.
SILENCE_S = 20.0
MAX_TEXT = 64 << 20
_BLOCK = 8 * 1024  # bytes of a row
_LENGTH = struct.Struct("!I")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 6))

_logger = logging.getLogger("bagua")


def send_message(connection: socket.socket, said: Mapping[str, Any], payload: memoryview | bytes = b"") -> None:
    text = json.dumps({**said, "bytes": len(payload)}).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)
    if payload:
        connection.sendall(payload)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """
    Raises:
        OSError: the connection is lost, or what comes is no message.
    """
    head = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > MAX_TEXT:
        raise ConnectionError(f"a message of {length} bytes was announced, and {MAX_TEXT} are allowed")
    text = bytearray(length)
    receive_into(connection, memoryview(text))
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ConnectionError("a message that is not JSON was received") from error
    if not isinstance(said, dict):
        raise ConnectionError("a message that is no JSON object was received")
    return said


def receive_into(connection: socket.socket, memory: memoryview) -> None:
    while memory:
        count = connection.recv_into(memory)
        if not count:
            raise ConnectionError("the connection was closed")
        memory = memory[count:]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory. It is contiguous, and on the CPU."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # as long as the view is
    return memoryview(memory).cast("B")


def _take_device(tensors: Sequence[torch.Tensor]) -> None:
    """This thread uses the GPU that they are on, and no other one has memory taken by it."""
    gpu = next((one.device for one in tensors if one.device.type == "cuda"), None)
    if gpu is not None:
        torch.cuda.set_device(gpu)


def _piece(tensor: torch.Tensor, begin: int, end: int) -> memoryview:
    """Bytes of a contiguous tensor, on the CPU: its own, or copies."""
    if tensor.device.type == "cpu":
        return bytes_of(tensor)[begin:end]
    return bytes_of(tensor.view(-1).view(torch.uint8)[begin:end].cpu())


def sums_of(tensor: torch.Tensor) -> int:
    """What differs for tensors that differ: a checksum of the sums of rows and of columns, at the speed of memory."""
    if not tensor.numel():
        return 0
    data = tensor.view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // _BLOCK * _BLOCK
    words = data[:whole].view(torch.int64).view(-1, _BLOCK // 8)
    crc = zlib.crc32(bytes_of(data[whole:].cpu()))
    for dimension in (0, 1) if whole else ():
        crc = zlib.crc32(bytes_of(words.sum(dimension).cpu()), crc)
    return crc


@dataclass(frozen=True)
class StateDoor:
    """Where a process serves its state, as it says in the store."""

    addresses: tuple[str, ...]
    port: int
    secret: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> StateDoor:
        said = json.loads(text)
        return cls(tuple(said["addresses"]), said["port"], said["secret"])

    def connect(self, request: Mapping[str, Any]) -> socket.socket:
        """A connection by which this was asked for.

        Raises:
            OSError: no address answers.
        """
        problem: OSError = ConnectionError("the process has told no address")
        for address in self.addresses:
            try:
                connection = socket.create_connection((address, self.port), CONNECT_S)
            except OSError as error:
                problem = error
                continue
            connection.settimeout(SILENCE_S)
            send_message(connection, {"secret": self.secret, **request})
            return connection
        raise problem


@dataclass(frozen=True)
class Offer:
    """
    step: of this state.
    description: what the one that takes it makes its tensors by.
    layout: the same where the same tensors come in the same order.
    tensors: contiguous; nobody writes to them.
    """

    step: int
    description: bytes
    layout: str
    tensors: Sequence[torch.Tensor]


@dataclass
class Guest:
    """A process that wants to join.

    name: of this attempt.
    is_ready: all members know of it.
    is_gone: its connection is lost.
    """

    name: str
    token: str
    is_ready: bool = False
    is_gone: bool = False


class StateServer:
    """
    Args:
        on_join: is given what a process says that wants to join, on a thread; returns the answer, and the guest if it
            may.
        on_follow: is given what it says that wants to follow, and its connection, on a thread.
    """

    def __init__(
        self,
        on_join: Callable[[dict[str, Any]], tuple[dict[str, Any], Guest | None]],
        on_follow: Callable[[dict[str, Any], socket.socket], None],
    ) -> None:
        self._on_join, self._on_follow = on_join, on_follow
        self._listener = listen()
        self._changed = threading.Condition()  # guards the offer, and the connections
        self._offer: Offer | None = None
        self._connections: set[socket.socket] = set()
        self._is_stopped = False
        self.door = StateDoor(tuple(own_addresses()), self._listener.getsockname()[1], secrets.token_hex(16))
        threading.Thread(target=self._accept, name="bagua-state", daemon=True).start()
        _servers.append(self)

    def offer(self, offer: Offer | None) -> None:
        """From now on; None: no more."""
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
            connections = tuple(self._connections)
        with contextlib.suppress(ValueError):
            _servers.remove(self)
        for one in (self._listener, *connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        """In a forked process, which has no such threads."""
        for one in (self._listener, *self._connections):
            one.close()

    def _accept(self) -> None:
        while not self._is_stopped:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._is_stopped:
                    self._changed.acquire()
                    self._changed.wait(1.0)  # too many open files, for example
                    self._changed.release()
                continue
            with self._changed:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="bagua-state", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(CONNECT_S)
            first = receive_message(connection)
            if not hmac.compare_digest(str(first.get("secret")).encode(), self.door.secret.encode()):
                return
            if "join" in first:
                self._attend(connection, first["join"])
            elif "follow" in first:
                connection.settimeout(SILENCE_S)
                self._on_follow(first["follow"], connection)
            else:
                self._give(connection, first["state"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            _logger.debug(f"A connection of a process that joins has ended: {error}")
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _attend(self, connection: socket.socket, said: dict[str, Any]) -> None:
        answer, guest = self._on_join(said)
        try:
            send_message(connection, answer)
            connection.settimeout(None)  # it waits for a step, and keepalives tell whether its host lives
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            while guest is not None:
                receive_message(connection)
                guest.is_ready = True
        finally:
            if guest is not None:
                guest.is_gone = True

    def _give(self, connection: socket.socket, step: int) -> None:
        with self._changed:
            is_there = self._changed.wait_for(
                lambda: self._is_stopped or (self._offer is not None and self._offer.step == step), SILENCE_S / 2
            )
            offer = self._offer
        if self._is_stopped or not is_there or offer is None:
            return
        connection.settimeout(SILENCE_S)
        _take_device(offer.tensors)
        said = {"sizes": [one.nbytes for one in offer.tensors], "layout": offer.layout}
        send_message(connection, said, offer.description)
        while True:
            request = receive_message(connection)
            if "sums" in request:
                sums = [sums_of(offer.tensors[index]) for index in request["sums"]]
                send_message(connection, {"sums": sums})
                continue
            index, begin, end = request["piece"]
            piece = _piece(offer.tensors[index], begin, end)
            send_message(connection, {"crc": zlib.crc32(piece)}, piece)


class Fetch:
    """Takes the state of a step from several processes. On one thread, which has others work.

    Args:
        doors: of those that have it.
        prepare: makes of a description the tensors to fill, in the offer's order: contiguous.
        compares: most of the tensors may be as they should be. Only those are taken that differ.
    """

    def __init__(
        self,
        step: int,
        doors: Sequence[StateDoor],
        prepare: Callable[[bytes], Sequence[torch.Tensor]],
        compares: bool = False,
    ) -> None:
        self._step, self._prepare, self._compares = step, prepare, compares
        self._doors = [one for one in doors for _ in range(min(CONNECTIONS, MAX_CONNECTIONS // len(doors) or 1))]
        self._pieces: queue.SimpleQueue[tuple[int, int, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._left = 0  # pieces
        self.received = 0  # bytes
        self.differing = 0  # tensors, of those that were compared
        self.problems: list[str] = []

    def run(self, on_progress: Callable[[int], None], pause_s: float = 1.0) -> bool:
        """
        Args:
            on_progress: is told from time to time how many bytes there are so far.

        Returns:
            whether all is there. Otherwise nobody is left that gives it.

        Raises:
            Exception: whatever `prepare` raises.
        """
        with contextlib.ExitStack() as stack:
            opened = self._open_first(stack)
            if opened is None:
                return False
            connection, layout, sizes, description = opened
            tensors = self._prepare(description)
            if [one.nbytes for one in tensors] != sizes:
                raise RuntimeError("The state of the job has other sizes than this process has made room for.")
            for index, size in enumerate(sizes):
                for piece in [(index, COMPARE, size)] if self._compares else pieces_of(index, size):
                    self._pieces.put(piece)
                    self._left += 1
            targets = list(tensors)
            threads = [threading.Thread(target=self._take, args=(connection, targets), daemon=True)]
            threads += [
                threading.Thread(target=self._take_of, args=(door, layout, targets), daemon=True)
                for door in self._doors
            ]
            for one in threads:
                one.start()
            on_progress(0)
            for one in threads:
                while one.is_alive():
                    one.join(pause_s)
                    on_progress(self.received)
        return not self._left

    def _open_first(self, stack: contextlib.ExitStack) -> tuple[socket.socket, str, list[int], bytes] | None:
        for position, door in enumerate(self._doors):
            try:
                connection = stack.enter_context(door.connect({"state": self._step}))
                said, description = _opened(connection)
            except (OSError, KeyError) as error:
                self.problems.append(str(error))
                continue
            self._doors = self._doors[position + 1 :]
            return connection, said["layout"], said["sizes"], description
        return None

    def _take_of(self, door: StateDoor, layout: str, targets: Sequence[torch.Tensor]) -> None:
        try:
            with door.connect({"state": self._step}) as connection:
                said, _ = _opened(connection)
                if said["layout"] == layout:
                    self._take(connection, targets)
        except (OSError, KeyError) as error:
            self._note(error)

    def _take(self, connection: socket.socket, targets: Sequence[torch.Tensor]) -> None:
        """Pieces, as long as there are some. One that is lost on the way goes back to the others, which look again
        while any is missing."""
        _take_device(targets)
        while self._left:
            try:
                piece = self._pieces.get(timeout=0.05)
            except queue.Empty:
                continue
            index, begin, end = piece
            try:
                if begin == COMPARE:
                    self._compare(connection, index, end, targets[index])
                    continue
                send_message(connection, {"piece": piece})
                said = receive_message(connection)
                if said["bytes"] != end - begin:
                    raise ConnectionError(f"{said['bytes']} bytes came instead of {end - begin}")
                target = targets[index].view(-1).view(torch.uint8)[begin:end]
                piece_memory = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
                memory = bytes_of(piece_memory)
                receive_into(connection, memory)
                if zlib.crc32(memory) != said["crc"]:
                    raise ConnectionError("the checksum of a piece is wrong")
                if piece_memory is not target:
                    target.copy_(piece_memory)
            except (OSError, KeyError) as error:
                self._pieces.put(piece)
                self._note(error)
                return
            with self._lock:
                self._left -= 1
                self.received += end - begin

    def _compare(self, connection: socket.socket, index: int, size: int, target: torch.Tensor) -> None:
        send_message(connection, {"sums": [index]})
        mine = sums_of(target)
        pieces = [] if receive_message(connection)["sums"] == [mine] else list(pieces_of(index, size))
        with self._lock:
            self._left += len(pieces) - 1
            self.differing += bool(pieces)
        for piece in pieces:
            self._pieces.put(piece)

    def _note(self, error: Exception) -> None:
        with self._lock:
            self.problems.append(str(error))
        _logger.warning(f"The state of the job: a connection is given up ({error}).")


def _opened(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    said = receive_message(connection)
    description = bytearray(said["bytes"])
    receive_into(connection, memoryview(description))
    return said, bytes(description)


def pieces_of(index: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, begin, end) in bytes, of at most PIECE_BYTES."""
    for begin in range(0, size, PIECE_BYTES):
        yield index, begin, min(size, begin + PIECE_BYTES)


_servers: list[StateServer] = []


def _forget_in_child() -> None:
    while _servers:
        _servers.pop().close()


os.register_at_fork(after_in_child=_forget_in_child)
