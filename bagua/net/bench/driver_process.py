"""A driver process on this machine. Owned by the LocalPlace that started it; used from the main thread only.

The parent-death signal of a driver follows the thread that started it, so drivers are started from the main thread.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchError

_QUIT_S = 2.0
_STDERR_TAIL_BYTES = 2000
# One event is one line; 1,000 iterations' times are some 20 KB. More than this is no driver.
_MAX_LINE_BYTES = 16 << 20


class DriverProcess:
    """Implements Endpoint over the pipes of a child process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._received = bytearray()
        self._ended = False
        self._quit_deadline: float | None = None
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
            raise BenchError(
                f"{name}: {command[0]!r} cannot be started ({error.strerror}); reinstall bagua, which brings it"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._stdout.fileno()

    def post(self, line: str) -> None:
        try:
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()
        except (BrokenPipeError, ValueError):
            # Whatever it said before it went is more useful than "broken pipe": next_event reports it.
            pass

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
                raise BenchError(f"{self._name} sent a line above {_MAX_LINE_BYTES} bytes; reinstall bagua")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise BenchError(
                f"{self._name} sent {line[:80]!r}, which is no JSON object; nothing else may write to the driver's"
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
        said = self._stderr_tail()
        remedy = f"its last words: {said}" if said else "it wrote nothing to stderr; set BAGUA_DRIVER_LOG=info"
        if said.endswith("out of memory") or "SIGKILL" in how:
            remedy += "; the kernel may have run out of memory: lower -e/--maxbytes or --ranks"
        return f"{self._name} (pid {self._process.pid}) {how} in the middle of the run; {remedy}"

    def _stderr_tail(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        return " | ".join(self._stderr.read().decode(errors="replace").strip().splitlines()[-8:])

    def quit(self) -> None:
        """Ask it to end; `close` waits for that, so that many can end at the same time."""
        if self._quit_deadline is not None:
            return
        self._quit_deadline = time.monotonic() + _QUIT_S
        self.post("quit")
        try:
            self._stdin.close()
        except BrokenPipeError:
            pass

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
            self._stderr.close()

    def kill(self) -> None:
        """End it now: after a failure its peers may be stuck in I/O, and the user waits for the message."""
        self._process.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
