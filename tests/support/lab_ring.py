"""A ring of load drivers, one on each host of a netlab network, that drive the installed library as NCCL's proxy does.

No packet leaves the namespaces. Every read has a deadline.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from support.load_driver import ANSWER_S, Event, LoadDriver, plugin_library, quit_all

if TYPE_CHECKING:
    from netlab import Lab  # a package of tools/, which the tests of netlab put on the path


def ring_driver(lab: Lab, host: int, arguments: Sequence[object], env: Mapping[str, str], log: Path) -> LoadDriver:
    """One on a host, with the variables of the lab's ranks and these."""
    words = ["ring", "--transport", "plugin", "--library", plugin_library(), "--rank", host, *arguments]
    variables = {**os.environ, "BAGUA_DRIVER_LOG": "info", **lab.rank_environment(host), **env}
    return LoadDriver(words, variables, log, enter=lambda command: lab.entering(host, command))


class Ring:
    """A driver on every host, listening; `connect` joins them. env: for all, or one for each."""

    def __init__(
        self,
        lab: Lab,
        *,
        channels: int = 2,
        device: str = "0",
        env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        timeout_ms: int = 30000,
        arguments: Sequence[object] = (),
    ) -> None:
        self.drivers: list[LoadDriver] = []
        self._logs = tempfile.TemporaryDirectory(prefix="bagua-ring-")
        count = len(lab.hosts)
        variables = list(env) if isinstance(env, Sequence) else [env or {}] * count
        try:
            for host in range(count):
                words = ["--nranks", count, "--channels", channels, "--device", device, "--timeout-ms", timeout_ms]
                log = Path(self._logs.name, str(host))
                self.drivers.append(ring_driver(lab, host, [*words, *arguments], variables[host], log))
            self.listening = [driver.expect("listening") for driver in self.drivers]
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for driver in self.drivers:
            driver.end()
        self._logs.cleanup()

    def connect(self, seconds: float = ANSWER_S) -> None:
        for rank, driver in enumerate(self.drivers):
            following = self.listening[(rank + 1) % len(self.drivers)]
            driver.say("connect " + " ".join(following["handles"]))
        for driver in self.drivers:
            driver.expect("connected", seconds)

    def run(self, size: int, iterations: int) -> list[Event]:
        """So many all-reduces, one after the other. The result of each rank."""
        for driver in self.drivers:
            driver.say(f"run {size} {iterations} 0")
        return [driver.expect("result") for driver in self.drivers]

    def verify(self, size: int) -> None:
        self.start_verify(size)
        self.finish_verify(size)

    def start_verify(self, size: int) -> None:
        """An all-reduce of so many bytes; every rank checks each byte of the sum."""
        for driver in self.drivers:
            driver.say(f"verify {size}")

    def finish_verify(self, size: int, seconds: float = ANSWER_S) -> None:
        for driver in self.drivers:
            event = driver.expect("verified", seconds)
            assert (event["bytes"], event["wrong_elements"], event["first_wrong"]) == (size, 0, None)

    def quit(self) -> None:
        quit_all(self.drivers)

    def pid(self, host: int) -> int:
        return self.drivers[host].process.pid
