"""Reads the pages of all processes of this host at one moment."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bagua.net.stats.errors import StatsError
from bagua.net.stats.layout import Page, generation_of, page_layout, read_page, slots_in_use

# A page is a memfd of the process, so that it goes with the process however that ends, and the kernel shows it to
# whoever may look at the process: its own user and root. Nothing of it lies in the file system.
PAGE_LINK = "/memfd:bagua-net-stats (deleted)"


@dataclass
class Search:
    """What one look through /proc found."""

    pages: dict[int, list[str]] = field(default_factory=dict)  # by process: paths of descriptors
    # Processes that this user may not look into. Where /proc hides them (mounted with hidepid=invisible), only the one
    # that always exists counts: that there are others is known, not how many.
    denied: int = 0


def find_pages(proc: Path = Path("/proc"), pid: int | None = None) -> Search:
    """A forked child holds its parent's page too: only the page itself tells whose it is.

    Raises:
        FileNotFoundError: there is no such process.
    """
    search = Search()
    names = [str(pid)] if pid is not None else [entry.name for entry in os.scandir(proc) if entry.name.isdecimal()]
    if pid is None and "1" not in names and _is_hidden(proc, 1):
        search.denied += 1
    for name in names:
        folder = f"{proc}/{name}/fd"
        try:
            descriptors = [entry.name for entry in os.scandir(folder)]
        except PermissionError:
            search.denied += 1
            continue
        except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
            if pid is None:
                continue  # it has ended meanwhile
            if not _is_hidden(proc, pid):
                raise FileNotFoundError(folder) from None
            search.denied += 1
            continue
        found = [path for path in (f"{folder}/{one}" for one in descriptors) if _is_page(path)]
        if found:
            search.pages[int(name)] = found
    return search


def _is_hidden(proc: Path, pid: int) -> bool:
    """Whether a process that `proc` does not show exists nevertheless: another user's, with hidepid=invisible."""
    try:
        if os.readlink(proc / "self") != str(os.getpid()):  # noqa: PTH115 - as below
            return False  # numbers of another PID namespace
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _is_page(path: str) -> bool:
    try:
        return os.readlink(path) == PAGE_LINK  # noqa: PTH115 - there are thousands, and a Path costs more than the call
    except OSError:
        return False


def open_page(path: str) -> int:
    """A descriptor of the page. Whatever else has that name cannot make the caller wait.

    Raises:
        OSError: it is gone, not permitted or not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor


@dataclass(frozen=True)
class KernelView:
    """
    Attributes:
        own_pid: the process id that the process itself sees: in a container it differs from the host's.
        state: as `ps` has it, such as "R" (running), "S" (sleeping), "T" (stopped) or "Z" (zombie).
    """

    own_pid: int
    state: str


def kernel_view(proc: Path, pid: int) -> KernelView:
    """
    Raises:
        OSError: the process has ended.
    """
    own_pid, state = pid, "?"
    for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
        if line.startswith("State:"):
            state = line.split()[1]
        elif line.startswith("NSpid:"):
            own_pid = int(line.split()[-1])
    return KernelView(own_pid, state)


def thread_seconds(proc: Path, pid: int) -> dict[str, float]:
    """CPU time in seconds of the I/O threads, by name; {} once the process has ended."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds: dict[str, float] = {}
    folder = f"{proc}/{pid}/task"
    try:
        threads = [entry.name for entry in os.scandir(folder)]
    except OSError:
        return {}
    for thread in threads:
        try:
            line = Path(folder, thread, "stat").read_text(errors="replace")
        except OSError:
            continue
        name = line[line.find("(") + 1 : line.rfind(")")]
        if not name.startswith("bagua-net-io"):
            continue
        values = line[line.rfind(")") + 2 :].split()
        seconds[name] = seconds.get(name, 0.0) + (int(values[11]) + int(values[12])) / ticks
    return seconds


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
