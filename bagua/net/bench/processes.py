"""The processes of ranks as rank 0 sees them: how they are asked, on this machine, and who starts and owns them.

[Note: the driver's protocol] A driver takes one text line on stdin and answers each with one JSON object on stdout,
{"event": ...}; its first event needs no question. {"event": "error"} and the end of the stream are failures.
bagua-net-driver and the ranks of `--nccl` speak it.

The parent-death signal of a process follows the thread that started it, so all are started from the main thread, which
alone uses what is here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any, Protocol, Self

from bagua.net.bench.errors import BenchError

Event = dict[str, Any]


class Endpoint(Protocol):
    """A driver that can be asked; nothing here blocks but `close`, which is bounded."""

    @property
    def name(self) -> str:
        """For errors: "plugin, rank 1"."""

    def fileno(self) -> int:
        """Readable when `next_event` may have something."""

    def post(self, line: str) -> None: ...

    def next_event(self) -> Event | None:
        """The next event, or None for "not yet". Raises BenchError when the driver failed or is gone."""

    def close(self) -> None:
        """End the process (politely, then by force) and reap it. Safe to call again."""


def gather(endpoints: Sequence[Endpoint], expected: str, timeout_s: float, doing: str) -> list[Event]:
    """One event of each endpoint, in their order. The first failure of any ends the wait at once: the others would
    only time out on their dead peer."""
    deadline = time.monotonic() + timeout_s
    events: list[Event | None] = [None] * len(endpoints)
    while True:
        for index, endpoint in enumerate(endpoints):
            if events[index] is None:
                event = endpoint.next_event()
                if event is not None:
                    events[index] = _checked(endpoint, event, expected, doing)
        silent = [endpoint for endpoint, event in zip(endpoints, events, strict=True) if event is None]
        if not silent:
            return [event for event in events if event is not None]
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            names = "; ".join(endpoint.name for endpoint in silent)
            raise BenchError(
                f"no answer from {names} within {timeout_s:g} s while {doing}; see that the machine is not overloaded"
                " and no firewall drops the connections, or allow more with --timeout"
            )
        # Bounded, because endpoints on one rendezvous connection can take each other's events off the socket.
        wait({endpoint.fileno() for endpoint in silent}, min(remaining, 0.5))


def _checked(endpoint: Endpoint, event: Event, expected: str, doing: str) -> Event:
    kind = event.get("event")
    if kind == "error":
        raise BenchError(f"{endpoint.name} failed while {doing}: {event.get('message', 'no message')}")
    if kind != expected:
        raise BenchError(
            f"{endpoint.name} answered {kind!r} where {expected!r} was expected, while {doing}; the driver and this"
            " package differ in version: reinstall bagua"
        )
    return event


def ask(endpoints: Sequence[Endpoint], line: str, expected: str, timeout_s: float) -> list[Event]:
    """The same line to all of them, then one answer of each."""
    for endpoint in endpoints:
        endpoint.post(line)
    shown = line if len(line) <= 60 else line[:57] + "..."
    return gather(endpoints, expected, timeout_s, f"at {line.split(' ')[0]!r} ({shown})")


_QUIT_S = 2.0
_STDERR_TAIL_BYTES = 2000
# One event is one line; 1,000 iterations' times are some 20 KB. More than this is no driver.
_MAX_LINE_BYTES = 16 << 20


_SHORTAGES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise fs.file-max, or end other programs",
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    errno.ENOMEM: "free memory on that host",
}


class DriverProcess:
    """Implements Endpoint over the pipes of a child process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._received = bytearray()
        self._ended = False
        self._quit_deadline: float | None = None
        self._shows_log = bool(environment.get("BAGUA_DRIVER_LOG"))
        # A file and not a pipe: nobody has to read it for the driver to go on.
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=dict(environment),
                # Ctrl-C reaches this process alone, which then ends its drivers in order.
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            remedy = _SHORTAGES.get(error.errno or 0, "reinstall bagua, which brings it")
            raise BenchError(f"{name}: {command[0]!r} cannot be started ({error.strerror}); {remedy}") from error
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    def fileno(self) -> int:
        return self._stdout.fileno()

    def post(self, line: str) -> None:
        # Whatever it said before it went is more useful than "broken pipe": next_event reports it.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    def next_event(self) -> Event | None:
        while (end := self._received.find(b"\n")) < 0:
            if self._ended:
                raise BenchError(self._death())
            try:
                data = os.read(self._stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return None
            self._ended = not data
            self._received += data
            if len(self._received) > _MAX_LINE_BYTES:
                raise BenchError(f"{self.name} sent a line above {_MAX_LINE_BYTES} bytes; reinstall bagua")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise BenchError(
                f"{self.name} sent {line[:80]!r}, which is no JSON object; nothing else may write to the driver's"
                " standard output (a wrapper or a preloaded library?)"
            )
        return event

    def _death(self) -> str:
        try:
            code = self._process.wait(_QUIT_S)
        except subprocess.TimeoutExpired:
            how = "closed its standard output"
        else:
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _STDERR_TAIL_BYTES))
        said = " | ".join(self._stderr.read().decode(errors="replace").strip().splitlines()[-8:])
        more = "" if self._shows_log else "; set BAGUA_DRIVER_LOG=info"
        remedy = f"its last words: {said}" if said else f"it wrote nothing to stderr{more}"
        if said.endswith("out of memory") or "SIGKILL" in how:
            remedy += "; the kernel may have run out of memory: lower -e/--maxbytes or --ranks"
        return f"{self.name} (pid {self.pid}) {how} in the middle of the run; {remedy}"

    def quit(self) -> None:
        """Ask it to end; `close` waits for that, so that many can end at the same time."""
        if self._quit_deadline is not None:
            return
        self._quit_deadline = time.monotonic() + _QUIT_S
        self.post("quit")
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def close(self) -> None:
        if self._stderr.closed:
            return
        self.quit()
        assert self._quit_deadline is not None
        try:
            self._process.wait(max(0.0, self._quit_deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._stdout.close()
            if self._shows_log:  # at the end, in one piece: in between it would cut the lines of the progress display
                self._stderr.seek(0)
                sys.stderr.write(self._stderr.read().decode(errors="replace"))
            self._stderr.close()

    def kill(self) -> None:
        """End it now: after a failure its peers may be stuck in I/O, and the user waits for the message."""
        self._process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Processes:
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
            (driver.kill if failed else driver.quit)()
        with contextlib.ExitStack() as closing:
            for driver in self._drivers:
                closing.callback(driver.close)
        self._drivers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


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
        self._drivers = Processes()

    def start(self, request: Request) -> DriverProcess:
        command = self.settings.command(request)
        return self._drivers.start(request.title, command, self.settings.process_environment(request))

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)
