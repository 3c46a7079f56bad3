"""One driver process seen from rank 0: here, or on another host through the rendezvous.

[Note: the driver's protocol] A driver takes one text line on stdin and answers each with one JSON object on stdout,
{"event": ...}; its first event needs no question. {"event": "error"} and the end of the stream are failures.
bagua-net-driver and the workers of `--nccl` speak it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, Protocol

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
    return gather(endpoints, expected, timeout_s, f"at {line.split(' ')[0]!r} ({_shortened(line)})")


def _shortened(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "..."
