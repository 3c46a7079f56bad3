"""How a command or launcher ends: what it tells its user when it cannot go on, and its exit code."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_OF_SIGNAL = 128  # plus the number of the signal, as shells report it
EXIT_INTERRUPTED = EXIT_OF_SIGNAL + 2  # Ctrl-C


class CommandError(Exception):
    """The message is printed after the command's name; it names the value, the cause and the remedy."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


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
