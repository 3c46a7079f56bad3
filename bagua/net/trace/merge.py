"""Several trace files as one: on one clock, with the processes of each apart."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from bagua.net.trace.trace_file import Event, TraceFile

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
