"""A ring of load drivers, one on each host of a netlab network, that drive the installed library as NCCL's proxy does.

No packet leaves the namespaces. Every read has a deadline.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from support.load_driver import driver_executable, plugin_library

if TYPE_CHECKING:
    from netlab import Lab  # a package of tools/, which the tests of netlab put on the path


class Driver:
    """One bagua-net-driver on one host. Owned by Ring."""

    def __init__(self, lab: Lab, host: int, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self.process: subprocess.Popen[bytes] = lab.start(
            host,
            [str(driver_executable()), "ring", "--transport", "plugin", "--library", str(plugin_library()), *arguments],
            {"BAGUA_DRIVER_LOG": "info", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        self._received = b""

    def post(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def next_event(self, seconds: float = 30.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise AssertionError(f"no answer from the driver within {seconds} s; its log:\n{self.log()}")
                read = os.read(self.process.stdout.fileno(), 65536)
                if not read:
                    raise AssertionError(f"the driver ended; its log:\n{self.log()}")
                self._received += read
        line, _, self._received = self._received.partition(b"\n")
        event = json.loads(line)
        assert isinstance(event, dict)
        return event

    def has_event(self) -> bool:
        """Whether `next_event` would not wait."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return b"\n" in self._received or bool(selector.select(0))

    def expect(self, name: str, seconds: float = 30.0) -> dict[str, Any]:
        event = self.next_event(seconds)
        assert event["event"] == name, f"{event}; the driver's log:\n{self.log()}"
        return event

    def log(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # a last line was still in the buffer
        self._stderr.close()


class Ring:
    """A driver on every host, listening; `connect` joins them."""

    def __init__(
        self,
        lab: Lab,
        *,
        channels: int = 2,
        device: str = "0",
        env: Mapping[str, str] | None = None,
        timeout_ms: int = 30000,
    ) -> None:
        self.drivers: list[Driver] = []
        count = len(lab.hosts)
        try:
            for host in range(count):
                arguments = ["--rank", host, "--nranks", count, "--channels", channels, "--device", device]
                environment = {**lab.rank_environment(host), **(env or {})}
                self.drivers.append(
                    Driver(lab, host, [*map(str, arguments), "--timeout-ms", str(timeout_ms)], environment)
                )
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
            driver.close()

    def connect(self, seconds: float = 30.0) -> None:
        for rank, driver in enumerate(self.drivers):
            following = self.listening[(rank + 1) % len(self.drivers)]
            driver.post("connect " + " ".join(following["handles"]))
        for driver in self.drivers:
            driver.expect("connected", seconds)

    def run(self, size: int, iterations: int) -> None:
        """So many all-reduces, one after the other."""
        for driver in self.drivers:
            driver.post(f"run {size} {iterations} 0")
        for driver in self.drivers:
            driver.expect("result")

    def verify(self, size: int) -> None:
        self.start_verify(size)
        self.finish_verify(size)

    def start_verify(self, size: int) -> None:
        """An all-reduce of so many bytes; every rank checks each byte of the sum."""
        for driver in self.drivers:
            driver.post(f"verify {size}")

    def finish_verify(self, size: int, seconds: float = 60.0) -> None:
        for driver in self.drivers:
            event = driver.expect("verified", seconds)
            assert (event["bytes"], event["wrong_elements"], event["first_wrong"]) == (size, 0, None)

    def quit(self) -> None:
        for driver in self.drivers:
            driver.post("quit")
        for driver in self.drivers:
            driver.expect("bye")
            assert driver.process.wait(10) == 0

    def pid(self, host: int) -> int:
        return self.drivers[host].process.pid
