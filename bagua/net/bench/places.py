"""Where a rank's processes are started: on this machine, or on another host by that host's own agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Endpoint


class Request(Protocol):
    """One process to start, a dataclass. It also comes from rank 0 over the network, so it names things and never
    commands."""

    @property
    def rank(self) -> int: ...

    @property
    def title(self) -> str: ...


class Settings(Protocol):
    """What this host makes of a request, from its own command line. Raises BenchError for one that it cannot meet."""

    def command(self, request: Any) -> list[str]: ...

    def process_environment(self, request: Any) -> Mapping[str, str]: ...


class Place(Protocol):
    """Starts processes and owns them."""

    def start(self, request: Request) -> Endpoint: ...

    def close(self, *, failed: bool) -> None:
        """End and reap every process that this place started; at once when the run has failed."""


class LocalPlace:
    """This machine. In a local run the one place of all ranks; across hosts rank 0's own."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._drivers = DriverGroup()

    def start(self, request: Request) -> DriverProcess:
        command = self.settings.command(request)
        return self._drivers.start(request.title, command, self.settings.process_environment(request))

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)
