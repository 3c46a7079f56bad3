"""Reads the pages of all processes of this host at one moment."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bagua.net.stats.errors import StatsError
from bagua.net.stats.layout import Page, generation_of, page_layout, read_page, slots_in_use
from bagua.net.stats.processes import KernelView, find_pages, kernel_view, open_page, thread_seconds

PROC = Path("/proc")

# A change of a page takes microseconds; only a process that was stopped in the middle of one takes longer.
_TRIES = 50
_PAUSE_S = 0.002


@dataclass(frozen=True)
class ProcessSnapshot:
    pid: int  # as the reader sees it
    kernel: KernelView
    page: Page
    taken_s: float  # monotonic clock
    thread_seconds: dict[str, float]


@dataclass(frozen=True)
class Snapshot:
    host: str
    unix_s: float
    processes: list[ProcessSnapshot]
    problems: list[str] = field(default_factory=list)  # processes that could not be read, and why
    denied: int = 0  # processes of other users, which may use Bagua-Net or not


def snapshot(pid: int | None = None, proc: Path = PROC) -> Snapshot:
    """All processes of this host that use Bagua-Net and that the caller may look at, by rank.

    Raises:
        StatsError: process `pid` does not exist, or the caller may not look at it.
    """
    try:
        search = find_pages(proc, pid)
    except FileNotFoundError:
        raise StatsError(
            f"Process {pid} does not exist.\n{proc} has no such process.\n"
            "`bagua-net stats` without --pid lists those that can be shown."
        ) from None
    if pid is not None and search.denied:
        raise StatsError(
            f"Process {pid} belongs to another user or is protected.\n"
            "Only its own user and root may look at it.\nRun the command as that user or with sudo."
        )
    processes: list[ProcessSnapshot] = []
    problems: list[str] = []
    denied = search.denied
    for number, paths in search.pages.items():
        for path in paths:
            try:
                one = _read_process(path, number, proc)
            except PermissionError:
                denied += 1
            except OSError:
                continue  # it has ended meanwhile
            except StatsError as error:
                problems.append(str(error))
            else:
                if one is not None:
                    processes.append(one)
    processes.sort(key=lambda one: (one.page.rank < 0, one.page.rank, one.pid))
    return Snapshot(socket.gethostname(), time.time(), processes, problems, denied)


def own_page() -> Page | None:
    """The page of this process, without its streams. None: it has none.

    Raises:
        StatsError: it cannot be read.
    """
    pid = os.getpid()
    for path in find_pages(pid=pid).pages.get(pid, ()):
        with _opened(path) as descriptor:
            page = _consistent_page(descriptor, "This process", with_streams=False)
        if page.pid == pid:  # else it is the parent's
            return page
    return None


def _read_process(path: str, pid: int, proc: Path) -> ProcessSnapshot | None:
    with _opened(path) as descriptor:
        page = _consistent_page(descriptor, f"Process {pid}")
    # Else it is a parent's page in a forked child.
    kernel = kernel_view(proc, pid)
    if page.pid != kernel.own_pid:
        return None
    return ProcessSnapshot(pid, kernel, page, time.monotonic(), thread_seconds(proc, pid))


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = open_page(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _consistent_page(descriptor: int, where: str, with_streams: bool = True) -> Page:
    at = page_layout().places
    for attempt in range(_TRIES):
        if attempt > 0:
            time.sleep(_PAUSE_S)
        # Holes read as zeros and stay holes, which they would not if the page were mapped.
        header = os.pread(descriptor, at["header_bytes"], 0)
        comms, streams = slots_in_use(header, where)
        comm_data = os.pread(descriptor, comms * at["comm_bytes"], at["header_bytes"])
        streams_offset = at["header_bytes"] + at["comm_slots"] * at["comm_bytes"]
        stream_data = os.pread(descriptor, streams * at["stream_bytes"], streams_offset) if with_streams else b""
        after = generation_of(os.pread(descriptor, at["header_bytes"], 0))
        if after == generation_of(header) and after % 2 == 0:
            return read_page(header, comm_data, stream_data)
    raise StatsError(
        f"The statistics page of {where[0].lower()}{where[1:]} is being changed, for {_TRIES * _PAUSE_S:g} s already.\n"
        "The process may be stopped while it opens or closes a connection.\nLet it continue (SIGCONT) and try again."
    )
