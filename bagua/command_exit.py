"""How a command or launcher ends: what it tells its user when it cannot go on, its exit code, and that what it has
started ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_OF_SIGNAL = 128  # plus the number of the signal, as shells report it
EXIT_INTERRUPTED = EXIT_OF_SIGNAL + 2  # Ctrl-C
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # not loaded in a forked process


class CommandError(Exception):
    """The message is printed after the command's name; it names the value, the cause and the remedy."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_with_stdout(program: str, run: Callable[[], int]) -> int:
    """The exit code of `run`, or 1 if what it prints goes nowhere: the reader has gone (`| head`), or the disk is full.
    Where stdout is closed (`>&-`), nothing is printed."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    try:
        exit_code = run()
        sys.stdout.flush()  # what is still in the buffer would otherwise meet the closed pipe after this function
        return exit_code
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_DISK_FULL):
            raise
        if error.errno != errno.EPIPE:
            print(f"{program}: the output cannot be written ({error.strerror})", file=sys.stderr)
            print("Free space on its disk, or write it elsewhere.", file=sys.stderr)
        # Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILURE


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Slurm and torchrun end a job with SIGTERM; within the block it acts as Ctrl-C does, so that a command that has
    started others ends them in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def die_with_parent(parent_pid: int | None = None) -> None:
    """The kernel kills this process when the thread ends that has started it, as it does when the parent is killed.

    Args:
        parent_pid: of the process that has started this one, and may have ended since. None: the present parent.
    """
    parent_pid = os.getppid() if parent_pid is None else parent_pid
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above.
    if os.getppid() != parent_pid:
        os._exit(1)
