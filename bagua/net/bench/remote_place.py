"""Drivers on other hosts: rank 0's view of them, and the agent that starts and feeds them there.

Orders: {"id": n, "start": {Request}}, {"id": n, "line": "..."}, {"finish": failed}.
Answers: {"id": n, "event": {...}}, whatever that driver said, in its order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchError
from bagua.net.bench.places import Request
from bagua.net.bench.rendezvous import LineConnection

# Between two looks of the agent; everything it waits for wakes it at once.
_WAIT_S = 5.0


class RemotePlace:
    """Rank 0's handle of another rank. Owns the connection."""

    def __init__(self, connection: LineConnection, host: str, rank: int) -> None:
        self._connection = connection
        self._host = host
        self._rank = rank
        self._endpoints: list[RemoteDriver] = []

    @property
    def host(self) -> str:
        return self._host

    def fileno(self) -> int:
        return self._connection.fileno()

    def start(self, request: Request) -> RemoteDriver:
        driver = RemoteDriver(self, len(self._endpoints), f"{request.title} on {self._host}")
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
                raise BenchError(f"rank {self._rank} on {self._host}: {message['failed']}")
            number, event = message.get("id"), message.get("event")
            if not isinstance(number, int) or not 0 <= number < len(self._endpoints) or not isinstance(event, dict):
                raise BenchError(
                    f"{self._connection.peer} answered {message!r}; its version of bagua differs: reinstall"
                )
            self._endpoints[number].arrived.append(event)

    def close(self, *, failed: bool) -> None:
        """Safe to call again."""
        try:
            self._connection.send({"finish": failed})
        except BenchError:
            pass  # It is gone already; its agent ends with the connection.
        self._connection.close()


class RemoteDriver:
    """Implements Endpoint over a RemotePlace."""

    def __init__(self, place: RemotePlace, number: int, name: str) -> None:
        self._place = place
        self._name = name
        self.number = number
        self.arrived: deque[Event] = deque()

    @property
    def name(self) -> str:
        return self._name

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
    while (event := _next_event(process)) is not None:
        connection.send({"id": number, "event": event})
        if event.get("event") in ("error", "bye"):
            return False
    return True


def _next_event(process: DriverProcess) -> Event | None:
    try:
        return process.next_event()
    except BenchError as error:
        return {"event": "error", "message": str(error)}
