"""A trace file of Bagua-Net or torch.profiler, as it was found: events, what their times count from, whose they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeGuard, cast

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


# Process ids for those that two ranks have; the kernel's are below.
_FIRST_FREE = 1 << 22
_FLOW_PHASES = frozenset("stf")


@dataclass(frozen=True)
class Merged:
    """What became of the files.

    Attributes:
        events: all of them, with ``ts`` in microseconds after ``base_ns``.
        base_ns: nanoseconds since 1970.
        apart: pairs of files that have no time in common, so that no picture shows both.
    """

    events: list[Event]
    base_ns: int
    apart: list[tuple[Path, Path]]

    def write(self, path: Path) -> None:
        """Writes them for Perfetto and chrome://tracing, compressed if the name ends in ``.gz``.

        Raises:
            OSError: the file cannot be written.
        """
        opened = gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")  # noqa: SIM115
        with cast("TextIO", opened) as file:
            file.write(f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{self.base_ns},"traceEvents":[\n')
            for position, event in enumerate(self.events):
                file.write((",\n" if position else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")


def merge(files: Sequence[TraceFile]) -> Merged:
    """Puts the events of several files on one clock.

    Files of the same host and rank are of the same processes, as those of Bagua-Net and torch.profiler of one rank.
    Process ids that different ranks share become different ones: the same number on two hosts, or the numbers of GPUs
    in torch's files. Where a file does not name its host or rank, it is taken for that of the others. A process that
    several files name keeps Bagua-Net's name, which has its rank."""
    base_ns = files[0].base_ns
    owners: dict[object, TraceFile] = {}
    renamed: dict[tuple[int, object], object] = {}
    free = _FIRST_FREE
    flows: dict[tuple[int, str], int] = {}
    named: set[object] = set()  # processes, by Bagua-Net
    other_names: list[Event] = []
    events: list[Event] = []
    for number, file in enumerate(files):
        shift_us = (file.base_ns - base_ns) / 1000
        group = next(index for index, other in enumerate(files) if _are_of_one_rank(other, file))
        for event in file.events:
            moved = dict(event)
            process = event.get("pid")
            if isinstance(process, int | str):
                if not _are_of_one_rank(owners.setdefault(process, file), file):
                    if (group, process) not in renamed:
                        renamed[group, process] = f"{process} ({file.path.name})" if isinstance(process, str) else free
                        free += 1
                    process = renamed[group, process]
                moved["pid"] = process
                if event.get("name") == "process_name":
                    if file.is_ours:
                        named.add(process)
                    else:
                        other_names.append(moved)
            if isinstance(event.get("ts"), int | float) and event.get("ph") != "M":
                moved["ts"] = round(event["ts"] + shift_us, 3)
            if event.get("ph") in _FLOW_PHASES and "id" in event:
                # Arrows do not lead from one file into another. Perfetto takes numbers only.
                moved["id"] = flows.setdefault((number, str(event["id"])), len(flows) + 1)
            events.append(moved)
    # Perfetto shows the first name.
    dropped = {id(one) for one in other_names if one["pid"] in named}
    return Merged([event for event in events if id(event) not in dropped], base_ns, _apart(files))


def _are_of_one_rank(left: TraceFile, right: TraceFile) -> bool:
    return all(
        one is None or other is None or one == other
        for one, other in ((left.host, right.host), (left.rank, right.rank))
    )


def _apart(files: Sequence[TraceFile]) -> list[tuple[Path, Path]]:
    spans = [(file.path, span) for file in files if (span := file.span_us()) is not None]
    return [
        (path, other_path)
        for index, (path, span) in enumerate(spans)
        for other_path, other in spans[index + 1 :]
        if span[1] < other[0] or other[1] < span[0]
    ]
