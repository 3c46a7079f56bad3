"""Where a rank's drivers are started: on this machine, or on another host by that host's own agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Endpoint
from bagua.net.bench.errors import BenchError
from bagua.net.bench.remote_place import serve
from bagua.net.bench.rendezvous import LineConnection
from bagua.net.bench.settings import DriverRequest, DriverSettings


class Place(Protocol):
    """Starts drivers and owns them."""

    def start(self, request: DriverRequest) -> Endpoint: ...

    def close(self, *, failed: bool) -> None:
        """End and reap every driver that this place started; at once when the run has failed."""


class LocalPlace:
    """This machine. In a local run the one place of all ranks; across hosts rank 0's own."""

    def __init__(self, settings: DriverSettings) -> None:
        self._settings = settings
        self._drivers = DriverGroup()

    def start(self, request: DriverRequest) -> DriverProcess:
        command = self._settings.command(request)
        return self._drivers.start(request.title, command, self._settings.driver_environment(request))

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)


def serve_rank_zero(connection: LineConnection, place: LocalPlace, rank: int) -> bool:
    """`serve`, starting load drivers of this rank."""

    def start(order: Mapping[str, Any]) -> DriverProcess:
        request = DriverRequest(**order)
        if request.rank != rank:
            raise BenchError(f"rank {rank} was told to start a driver of rank {request.rank}")
        return place.start(request)

    return serve(connection, start)
