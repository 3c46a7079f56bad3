"""Where the reports of a host come from: its own statistics pages, `bagua-net stats` over ssh, or its exporter. A
thread each, so that a host that does not answer never holds up the screen."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Protocol

from bagua.host_port import require_port
from bagua.net.stats.errors import NotAReportError, StatsError
from bagua.net.stats.quantities import printable
from bagua.net.stats.rates import report
from bagua.net.stats.report_json import MAX_BYTES, report_from_json
from bagua.net.stats.reports import HostReport
from bagua.net.stats.snapshots import snapshot

# A host is tried again after this time: its job may start later, or the network come back.
RETRY_S = 5.0
REPORT_PATH = "/report"  # of `bagua-net exporter`
_ANSWER_S = 10.0

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@:%-]*")
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-T")


@dataclass(frozen=True)
class HostState:
    name: str
    report: HostReport | None  # the last one
    received_s: float  # monotonic clock
    problem: str | None  # why there is no newer one


class Source(Protocol):
    def state(self) -> HostState: ...
    def close(self) -> None: ...


def second_reports(sources: Sequence[Source], timeout_s: float = 30.0) -> Iterator[HostState]:
    """Of each host, when it has the second report: the first has no rates. Or why there is none."""
    deadline = time.monotonic() + timeout_s
    for source in sources:
        state = source.state()
        while time.monotonic() < deadline and state.problem is None:
            if state.report is not None and state.report.interval_s is not None:
                break
            time.sleep(0.02)
            state = source.state()
        yield state


def checked_hosts(text: str) -> list[str]:
    """
    Raises:
        ValueError: a name that is none, or that ssh would take for an option.
    """
    hosts = [one.strip() for one in text.split(",") if one.strip()]
    wrong = [one for one in hosts if not _HOST.fullmatch(one)]
    if wrong or not hosts:
        raise ValueError(f"{(wrong or [text])[0]!r} is not a host name; give names separated by commas")
    return list(dict.fromkeys(hosts))


class _Threaded:
    """A thread that keeps a HostState up to date."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()  # guards _state
        self._state = HostState(name, None, time.monotonic(), None)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"bagua-net-source {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def state(self) -> HostState:
        with self._lock:
            return self._state

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        raise NotImplementedError

    def _put(self, new: HostReport) -> None:
        with self._lock:
            self._state = HostState(self._state.name, new, time.monotonic(), None)

    def _put_problem(self, problem: str) -> None:
        shown = "\n".join(map(printable, problem.split("\n")))
        with self._lock:
            self._state = replace(self._state, problem=shown)


class LocalSource(_Threaded):
    def __init__(self, interval_s: float) -> None:
        super().__init__("this host")
        self._interval_s = interval_s
        self.start()

    def _run(self) -> None:
        earlier = None
        while True:
            later = snapshot()
            self._put(report(earlier, later))
            earlier = later
            if self._closing.wait(self._interval_s):
                return


class EndpointSource(_Threaded):
    """
    Args:
        endpoint: HOST:PORT of a `bagua-net exporter`, or its URL.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, endpoint: str, interval_s: float) -> None:
        super().__init__(endpoint)
        if "://" not in endpoint:
            require_port(endpoint.partition("/")[0])
            endpoint = f"http://{endpoint}"
        parts = urllib.parse.urlsplit(endpoint)
        is_known = parts.scheme in ("http", "https") and parts.path in ("", "/", "/metrics") and parts.port != 0
        if not is_known or not parts.hostname:
            raise ValueError(f"{endpoint!r} is not HOST:PORT or http://HOST:PORT")
        self._url = f"{parts.scheme}://{parts.netloc}{REPORT_PATH}"
        self._interval_s = interval_s
        self.start()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with urllib.request.urlopen(self._url, timeout=_ANSWER_S) as answer:
                    self._put(report_from_json(answer.read(MAX_BYTES), self._url))
            except (http.client.HTTPException, NotAReportError) as error:
                self._put_problem(self._not_an_exporter(error))
            except urllib.error.HTTPError as error:
                is_its_own = error.code >= 500 and error.code != HTTPStatus.NOT_IMPLEMENTED
                self._put_problem(f"{self._url}: {error}" if is_its_own else self._not_an_exporter(error))
            except OSError as error:
                why = error.reason if isinstance(error, urllib.error.URLError) else error
                self._put_problem(f"{self._url}: {why}\nStart `bagua-net exporter` there, or correct the address.")
            except (ValueError, StatsError) as error:
                self._put_problem(f"{self._url}: {error}")
            self._closing.wait(self._interval_s)

    def _not_an_exporter(self, error: Exception) -> str:
        why = error.why if isinstance(error, NotAReportError) else str(error).strip() or type(error).__name__
        return (
            f"{self._url.removesuffix(REPORT_PATH)} is not a bagua-net exporter ({why}).\n"
            "Give the address that `bagua-net exporter` prints when it starts."
        )


class SshSource(_Threaded):
    """
    Args:
        command: how `bagua-net` is called there.
        ssh: the program and its options.
    """

    def __init__(self, host: str, interval_s: float, command: str, ssh: Sequence[str] = _SSH) -> None:
        super().__init__(host)
        self._host = host
        self._words = [*ssh, "--", host, f"exec {command} stats --json --watch --interval {interval_s:g}"]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def close(self) -> None:
        self._closing.set()
        process = self._process
        if process is not None:
            process.terminate()
        super().close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._put_problem(self._follow())
            except OSError as error:
                self._put_problem(f"ssh cannot be started: {error.strerror}")
            except StatsError as error:
                self._put_problem(str(error))
            if self._closing.wait(RETRY_S):
                return

    def _follow(self) -> str:
        """Until the command ends; why it did."""
        # A group of its own: Ctrl-C in the terminal is for the screen, which closes its sources in order.
        with subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            self._process = process
            errors: list[bytes] = []
            assert process.stdout is not None and process.stderr is not None  # noqa: PT018
            reader = threading.Thread(target=_keep_tail, args=(process.stderr, errors), daemon=True)
            reader.start()
            try:
                while line := process.stdout.readline(MAX_BYTES):
                    self._put(report_from_json(line, self._host))
                    if self._closing.is_set():
                        break
            finally:
                self._process = None
                _end(process)
            reader.join(timeout=5)
            said = b"".join(errors).decode(errors="replace").strip().splitlines()
            return f"{said[-1] if said else 'the connection ended'} (exit code {process.returncode})"


def _keep_tail(pipe: object, kept: list[bytes]) -> None:
    for line in pipe:  # type: ignore[attr-defined]
        kept[:] = [*kept[-4:], line[:500]]


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
