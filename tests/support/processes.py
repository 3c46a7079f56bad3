"""What tests ask about processes: whether one still lives, and to wait until something holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


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


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """
    Raises:
        AssertionError: it did not hold within `seconds`; names `what`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
