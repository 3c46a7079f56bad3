"""A bagua-net-driver process for tests, driven through its protocol. Every read has a deadline."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.net import library

Event = dict[str, Any]

# Far above what any step takes, also while a machine builds something: only a hang reaches it.
ANSWER_S = 60.0
# For errors of a lost or silent peer, on a machine that is busy: less than the timeout of messages.
FAILURE_S = 40.0


def driver_executable() -> Path:
    """The installed driver, or the one that BAGUA_DRIVER names (a build directory's)."""
    chosen = os.environ.get("BAGUA_DRIVER")
    return Path(chosen) if chosen else library.driver_path()


def plugin_library() -> Path:
    """The installed plugin, or the one that BAGUA_DRIVER_LIBRARY names."""
    chosen = os.environ.get("BAGUA_DRIVER_LIBRARY")
    return Path(chosen) if chosen else library.library_path()


class LoadDriver:
    """enter: what has to be started for the driver's command to run elsewhere."""

    def __init__(
        self,
        arguments: Sequence[object],
        environment: Mapping[str, str],
        stderr: Path,
        enter: Callable[[list[str]], list[str]] = list,
    ) -> None:
        self._stderr = stderr
        with stderr.open("wb") as log:
            self.process = subprocess.Popen(
                enter([str(driver_executable()), *(str(argument) for argument in arguments)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment),
            )
        self._received = bytearray()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def next_event(self, deadline_s: float = ANSWER_S) -> Event:
        assert self.process.stdout is not None
        deadline = time.monotonic() + deadline_s
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, left))
            assert ready, f"no answer within {deadline_s} s; its log:\n{self.log()}"
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"the driver ended without an answer: exit code {self.process.wait()}, {self.log()!r}"
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        event = json.loads(line)
        assert isinstance(event, dict)
        return event

    def has_event(self) -> bool:
        """Whether `next_event` would not wait."""
        return b"\n" in self._received or bool(select.select([self.process.stdout], [], [], 0)[0])

    def expect(self, name: str, deadline_s: float = ANSWER_S) -> Event:
        event = self.next_event(deadline_s)
        assert event["event"] == name, f"{event}; the driver's log:\n{self.log()}"
        return event

    def expect_failure(self, deadline_s: float = ANSWER_S) -> str:
        """The message of the error that ends the driver with exit code 1."""
        message = self.expect("error", deadline_s)["message"]
        assert isinstance(message, str)
        assert self.process.wait(ANSWER_S) == 1
        return message

    def expect_end(self) -> None:
        self.expect("bye")
        assert self.process.wait(ANSWER_S) == 0
        assert self.process.stdout is not None
        assert self.process.stdout.read() == b"", "bye is the last word"

    def log(self) -> str:
        return self._stderr.read_text(errors="replace")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # a command that the driver did not live to read


# What the fixture start_driver gives: LoadDriver(*arguments) with the given variables set.
StartDriver = Callable[..., LoadDriver]


def connect_ring(drivers: Sequence[LoadDriver]) -> list[Event]:
    """Each to the next one. Returns what each has said as it began to listen."""
    listening = [one.expect("listening") for one in drivers]
    for one, following in zip(drivers, [*listening[1:], listening[0]], strict=True):
        one.say("connect " + " ".join(following["handles"]))
    for one in drivers:
        one.expect("connected")
    return listening


def ask(drivers: Sequence[LoadDriver], command: str, event: str) -> list[Event]:
    """All of them at once; their answers."""
    for one in drivers:
        one.say(command)
    return [one.expect(event) for one in drivers]


def quit_all(drivers: Iterable[LoadDriver]) -> None:
    drivers = list(drivers)
    for driver in drivers:
        driver.say("quit")
    for driver in drivers:
        driver.expect_end()


def sent_bytes(interface: str, pid: int | str = "self") -> int:
    """So far, by the interface of the network that the process is in."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise AssertionError(f"no interface {interface}")


def loopback_bytes() -> int:
    return sent_bytes("lo")
