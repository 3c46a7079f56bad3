"""Finds the processes of this host that have a statistics page.

A page is a memfd of the process, so that it goes with the process however that ends, and the kernel shows it to whoever
may look at the process: its own user and root. Nothing of it lies in the file system.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

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
