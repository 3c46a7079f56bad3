"""The ranks of a run and where they are: all here, or one per launched process, and then rank 0's view of processes on
other hosts, and the agent that starts and feeds them there.

Orders: {"id": n, "start": {Request}}, {"id": n, "line": "..."}, {"finish": failed}.
Answers: {"id": n, "event": {...}}, whatever that process said, in its order.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Self

from bagua.net.bench.driver import NetworkPath
from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LaunchEnvironment
from bagua.net.bench.processes import DriverProcess, Event, LocalPlace, Place, Request
from bagua.net.bench.rendezvous import LineConnection, Member, join, meet, network_identity

# Between two looks of the agent; everything it waits for wakes it at once.
_WAIT_S = 5.0


class RemotePlace:
    """Rank 0's handle of another rank. Owns the connection."""

    def __init__(self, connection: LineConnection, host: str, rank: int) -> None:
        self._connection = connection
        self.host = host
        self._rank = rank
        self._endpoints: list[RemoteDriver] = []

    def fileno(self) -> int:
        return self._connection.fileno()

    def start(self, request: Request) -> RemoteDriver:
        driver = RemoteDriver(self, len(self._endpoints), f"{request.title} on {self.host}")
        self._endpoints.append(driver)
        self.send({"id": driver.number, "start": vars(request)})
        return driver

    def send(self, message: Event) -> None:
        try:
            self._connection.send(message)
        except BenchError:
            # A rank that cannot take part says why and goes; that says more than a broken pipe.
            self.receive_all()
            raise

    def receive_all(self) -> None:
        """Sort what has arrived into the endpoints."""
        while (message := self._connection.receive(0)) is not None:
            if "failed" in message:
                raise BenchError(f"rank {self._rank} on {self.host}: {message['failed']}")
            number, event = message.get("id"), message.get("event")
            if not isinstance(number, int) or not 0 <= number < len(self._endpoints) or not isinstance(event, dict):
                raise BenchError(
                    f"{self._connection.peer} answered {message!r}; its version of bagua differs: reinstall"
                )
            self._endpoints[number].arrived.append(event)

    def close(self, *, failed: bool) -> None:
        """Safe to call again."""
        with contextlib.suppress(BenchError):  # it may be gone already; its agent ends with the connection
            self._connection.send({"finish": failed})
        self._connection.close()


class RemoteDriver:
    """Implements Endpoint over a RemotePlace."""

    def __init__(self, place: RemotePlace, number: int, name: str) -> None:
        self._place = place
        self.name = name
        self.number = number
        self.arrived: deque[Event] = deque()

    def fileno(self) -> int:
        return self._place.fileno()

    def post(self, line: str) -> None:
        self._place.send({"id": self.number, "line": line})

    def next_event(self) -> Event | None:
        if not self.arrived:
            self._place.receive_all()
        return self.arrived.popleft() if self.arrived else None

    def close(self) -> None:
        """The agent closes its drivers together, at "finish"."""


def serve(
    connection: LineConnection, start: Callable[[Mapping[str, Any]], DriverProcess], deadline: float = math.inf
) -> bool:
    """The agent: every rank but 0 does nothing else. `start` may raise BenchError, and TypeError for an order that it
    does not understand. Returns at "finish", whether the run failed; a lost rank 0, or one that has not finished by
    `deadline` (of time.monotonic()), raises BenchError. Either way the processes are ended by the caller, who closes
    the place."""
    processes: dict[int, DriverProcess] = {}
    ended: set[int] = set()
    while True:
        if time.monotonic() > deadline:
            raise BenchError(f"{connection.peer} did not finish in time; its own output says what it waits for")
        while (order := connection.receive(0)) is not None:
            if "finish" in order:
                return bool(order["finish"])
            number = int(order["id"])
            if "start" in order:
                try:
                    processes[number] = start(order["start"])
                except (BenchError, TypeError) as error:
                    connection.send({"id": number, "event": {"event": "error", "message": str(error)}})
            elif order.get("line") == "quit" and number in processes:
                # A backend that failed: its other ranks may be stuck in a collective and would never read it.
                processes[number].close()
                ended.add(number)
            elif number in processes and number not in ended:
                processes[number].post(str(order["line"]))
        # After the orders: some may have been read together with what came before `serve`, and would wake nobody.
        live = {number: process for number, process in processes.items() if number not in ended}
        wait([connection.fileno(), *(process.fileno() for process in live.values())], _WAIT_S)
        for number, process in live.items():
            if not _forward(connection, number, process):
                ended.add(number)


def _forward(connection: LineConnection, number: int, process: DriverProcess) -> bool:
    """Everything that the process said; False after its last word, a failure among them."""
    while True:
        try:
            event = process.next_event()
        except BenchError as error:
            event = {"event": "error", "message": str(error)}
        if event is None:
            return True
        connection.send({"id": number, "event": event})
        if event.get("event") in ("error", "bye"):
            return False


# Of an address of this host, towards the other ranks, and the number of ranks here. May raise BenchError or ValueError.
MakePlace = Callable[[str, int], tuple[LocalPlace, NetworkPath]]


@dataclass
class Ranks:
    """places[rank]; leaving the `with` ends every process everywhere.

    Attributes:
        networks: Equal for ranks that share a loopback interface (see network_identity).
        local_ranks: The rank's number on its host.
        members: Of a launched run.
    """

    places: Sequence[Place]
    networks: Sequence[str]
    path: NetworkPath
    local_ranks: Sequence[int] = ()
    members: Sequence[Member] = ()

    @staticmethod
    def local(place: LocalPlace, ranks: int, path: NetworkPath) -> Ranks:
        return Ranks([place] * ranks, [network_identity()] * ranks, path, range(ranks))

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def hosts(self) -> int:
        return len(set(self.networks))

    @property
    def measured_link(self) -> int:
        """The rank whose connection to the next one stands for the path: it leaves rank 0's host if any does."""
        leaving = self._leaving()
        return leaving[0] if leaving else 0

    @property
    def links(self) -> int:
        """Connections of the ring that share that path."""
        return len(self._leaving()) or self.count

    def _leaving(self) -> list[int]:
        home = self.networks[0]
        following = [*self.networks[1:], home]
        pairs = enumerate(zip(self.networks, following, strict=True))
        return [rank for rank, (own, next_one) in pairs if own == home != next_one]

    def close(self, *, failed: bool) -> None:
        """Safe to call again. The agents of other hosts exit with 1 if it failed."""
        for place in dict.fromkeys(self.places):
            place.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


def lead_ranks(
    launch: LaunchEnvironment,
    timeout_s: float,
    say: Callable[[str], None],
    make: MakePlace,
    facts: Mapping[str, Any] | None = None,
) -> Ranks:
    """Rank 0 of a launched run. `facts`: of this rank; see Member."""
    members = meet(launch, timeout_s, say, facts=facts)
    try:
        mine, path = make(_address_towards_others(members), _ranks_with(members, members[0]))
    except BaseException:
        for member in members:
            if member.connection is not None:
                member.connection.close()
        raise
    others = [RemotePlace(m.connection, m.host, m.rank) for m in members if m.connection is not None]
    local_ranks = [_ranks_with(members[:rank], member) for rank, member in enumerate(members)]
    return Ranks([mine, *others], [member.network for member in members], path, local_ranks, members)


def _ranks_with(members: Sequence[Member], member: Member) -> int:
    return sum(one.identity == member.identity for one in members)


def _address_towards_others(members: Sequence[Member]) -> str:
    """The address by which the first rank of another host (or else of this one) reached us."""
    others = [(member.network == members[0].network, member.connection) for member in members[1:]]
    connection = min(others, key=lambda other: other[0])[1]
    assert connection is not None
    return connection.local_address


def follow(
    launch: LaunchEnvironment,
    timeout_s: float,
    make: MakePlace,
    request: Callable[..., Request],
    facts: Mapping[str, Any] | None = None,
) -> int:
    """Every other rank: serve rank 0, which reports, until it has finished. Returns the exit code."""
    connection, local_ranks = join(launch, timeout_s, facts)
    try:
        try:
            place, _ = make(connection.local_address, local_ranks)
        except (BenchError, ValueError) as error:
            connection.send({"failed": str(error)})
            raise

        def start(order: Mapping[str, Any]) -> DriverProcess:
            wanted = request(**order)
            if wanted.rank != launch.rank:
                raise BenchError(f"rank {launch.rank} was told to start a process of rank {wanted.rank}")
            return place.start(wanted)

        failed = True
        try:
            failed = serve(connection, start)
        finally:
            place.close(failed=failed)
        return 1 if failed else 0
    finally:
        connection.close()
