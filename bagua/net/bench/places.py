"""Where a rank's drivers are started: on this machine, or on another host by that host's own agent."""

from __future__ import annotations

import contextlib
from typing import Protocol

from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Endpoint
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
        self._drivers: list[DriverProcess] = []

    def start(self, request: DriverRequest) -> DriverProcess:
        command = self._settings.command(request)
        driver = DriverProcess(request.title, command, self._settings.driver_environment(request))
        self._drivers.append(driver)
        return driver

    def close(self, *, failed: bool) -> None:
        for driver in self._drivers:
            if failed:
                driver.kill()
            else:
                driver.quit()
        with contextlib.ExitStack() as closing:
            for driver in self._drivers:
                closing.callback(driver.close)
        self._drivers.clear()
