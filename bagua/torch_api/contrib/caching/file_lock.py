"""A lock on a file between the processes of a node, with a deadline. The kernel releases that of a dead one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.002


@contextlib.contextmanager
def locked_file(path: Path, timeout_s: float) -> Iterator[None]:
    """
    Raises:
        TimeoutError: others held the lock all the time.
        OSError: the file cannot be opened.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # flock has no time-out of its own
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {timeout_s} s") from None
                time.sleep(_POLL_S)
        try:
            yield
        finally:
            # Not by closing alone: a child that was forked meanwhile has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)
