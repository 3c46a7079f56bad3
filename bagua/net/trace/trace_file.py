"""A trace file of Bagua-Net or torch.profiler, as it was found: events, what their times count from, whose they are."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

Event = dict[str, Any]

# The first events of a file of Bagua-Net's have one of this name, with the same values as torch's file in its root.
_OURS = "bagua_net_trace"
_GZIP = b"\x1f\x8b"


class TraceError(Exception):
    """A file that cannot be used; the message names it."""


@dataclass(frozen=True)
class TraceFile:
    """One file.

    Attributes:
        path: where it was read.
        events: in the order of the file.
        base_ns: nanoseconds from 1970 to what ``ts`` counts from.
        host: host of the process; None: not known.
        rank: its rank in the job; None: not known.
        is_ours: it is Bagua-Net's.
    """

    path: Path
    events: list[Event]
    base_ns: int
    host: str | None
    rank: int | None
    is_ours: bool

    @classmethod
    def read(cls, path: Path) -> TraceFile:
        """Reads a file, compressed or not. That of a process that was killed may end anywhere.

        Raises:
            TraceError: the file cannot be read, or is not a trace.
        """
        document = _parse(path, _content(path))
        if isinstance(document, list):
            return cls._of_array(path, [event for event in document if isinstance(event, dict)])
        if isinstance(document, dict) and isinstance(document.get("traceEvents"), list):
            return cls._of_object(path, document)
        raise TraceError(f"{path} is not a trace: it has no list of events")

    @classmethod
    def _of_array(cls, path: Path, events: list[Event]) -> TraceFile:
        facts = next((event.get("args") for event in events if event.get("name") == _OURS), None)
        base_ns = facts.get("baseTimeNanoseconds") if isinstance(facts, dict) else None
        if not isinstance(facts, dict) or not _is_number(base_ns):
            raise TraceError(
                f"{path} does not say when it was recorded: it is neither Bagua-Net's nor torch.profiler's"
            )
        return cls(path, events, int(base_ns), _host(facts.get("host")), _rank(facts.get("rank")), True)

    @classmethod
    def _of_object(cls, path: Path, document: dict[str, Any]) -> TraceFile:
        # Before torch 2.4, times count from 1970.
        base_ns = document.get("baseTimeNanoseconds", 0)
        if not _is_number(base_ns):
            raise TraceError(f"{path}: baseTimeNanoseconds is {base_ns!r} and not a number")
        job = document.get("distributedInfo")
        rank = _rank(job.get("rank")) if isinstance(job, dict) else None
        events = [event for event in document["traceEvents"] if isinstance(event, dict)]
        return cls(path, events, int(base_ns), _host(document.get("host_name")), rank, False)

    def span_us(self) -> tuple[float, float] | None:
        """First and last time of an event, in microseconds since 1970; None: there is no event."""
        times = [
            event["ts"]
            for event in self.events
            if _is_number(event.get("ts")) and event.get("ph") != "M" and event["ts"] > 0
        ]
        return (min(times) + self.base_ns / 1000, max(times) + self.base_ns / 1000) if times else None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _host(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _rank(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _content(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    return content.decode(errors="replace")


def _parse(path: Path, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        # The format allows an array to have no end. Bagua-Net writes an event a line.
        end = text.rfind("},\n")
        if not text.startswith("[") or end < 0:
            raise TraceError(f"{path} is not JSON: {error}") from error
    try:
        return json.loads(text[: end + 1] + "]")
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
