"""Driver processes that one part of a run started and owns. Used from the main thread only."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from bagua.net.bench.driver_process import DriverProcess


class DriverGroup:
    """Ends and reaps what it started: on leaving the `with`, or in close()."""

    def __init__(self) -> None:
        self._drivers: list[DriverProcess] = []

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> DriverProcess:
        driver = DriverProcess(name, command, environment)
        self._drivers.append(driver)
        return driver

    def close(self, *, failed: bool) -> None:
        """At once when the run has failed; else all are asked first, so that they end at the same time."""
        for driver in self._drivers:
            if failed:
                driver.kill()
            else:
                driver.quit()
        with contextlib.ExitStack() as closing:
            for driver in self._drivers:
                closing.callback(driver.close)
        self._drivers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)
