"""What tests ask about processes: whether one still lives, to wait until something holds, and to do it in a child."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0  # far beyond what anything takes, on a busy machine as well: only a hang reaches it


def is_alive(pid: int) -> bool:
    """Not so once it has ended, even while its parent, or whoever adopted it, has not collected it yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The name, in brackets, may itself contain brackets and blanks.
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def living_pids(folder: Path) -> list[int]:
    """Of the processes that left a file named by their pid in `folder`, those that still live."""
    return [pid for pid in (int(path.name) for path in folder.iterdir()) if is_alive(pid)]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    """
    Raises:
        AssertionError: it did not hold within `seconds`; names `what`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


@contextmanager
def ahead_of_others() -> Iterator[None]:
    """This thread, and what it starts meanwhile, gets a CPU before every ordinary process, as `chrt --fifo` has it.

    For a test that acts within a time that something else sets, such as the middle of a transfer: on a busy machine the
    turn would come after it. Only for what sleeps or is short, or it would keep others from the CPU.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def forked(function: Callable[..., object], *arguments: Any) -> int:
    """The pid of a child that calls it. An exception is its exit status 1."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(60)  # ends it, should it hang
        try:
            function(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def exit_code_of(child: int) -> int:
    """Waits for it. Negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(function: Callable[..., object], *arguments: Any) -> None:
    assert exit_code_of(forked(function, *arguments)) == 0
