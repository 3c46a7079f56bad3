"""Ends a command together with what it started, and says what it wrote last."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# torchrun gives its workers 30 s to end after SIGTERM.
TERMINATION_S = 40.0
LAST_LINES = 15
_TICK_S = 0.25
_MAX_LINE_BYTES = 1 << 16
# A process that the command leaves behind may keep its output open.
_DRAIN_S = 1.0
_TORCHRUN_LOG = re.compile(r"[WE]\d{4} .*torch/distributed/elastic/multiprocessing/")
# What torchrun prints before its ranks start, with or without a prefix, by version.
_TORCHRUN_BANNER = re.compile(r"(W\d{4} .*torch/distributed/run\.py:\d+\] ?)?(\*+|Setting OMP_NUM_THREADS .*)?")


def start_command(
    command: Sequence[str], environment: Mapping[str, str], failure: type[Exception]
) -> subprocess.Popen[bytes]:
    """Starts it in a session of its own, with its output in one pipe: Ctrl-C reaches this process alone, which then
    ends the command in order. Raises `failure`, which names the command and the cause."""
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise failure(
            f"{command[0]!r} cannot be started: {error.strerror or error}\nCheck its name and PATH."
        ) from error


@contextmanager
def running(start: Callable[[], subprocess.Popen[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
    """The process that `start` returns, which must lead its group (`start_new_session=True`). An exception in the block
    ends it (`end_tree`), and so does Ctrl-C or SIGTERM while it is being started. For the main thread."""
    process = None
    try:
        with _signals_held_back():
            process = start()
        yield process
    except BaseException:
        if process is not None:
            end_tree(process)
        raise
    finally:
        if process is not None and process.stdout is not None:
            process.stdout.close()


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Each line of the output, which a carriage return ends, too; and None every now and then, until the process has
    ended. The caller watches the clock."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    os.set_blocking(descriptor, False)
    pending = b""
    ended_at = None
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while ended_at is None or time.monotonic() - ended_at <= _DRAIN_S:
            if process.poll() is not None and ended_at is None:
                ended_at = time.monotonic()
            data = os.read(descriptor, 1 << 16) if selector.select(_TICK_S) else None
            if data == b"":
                break
            *whole, pending = (pending + (data or b"")).replace(b"\r", b"\n").split(b"\n")
            pending = pending[:_MAX_LINE_BYTES]
            yield from (line[:_MAX_LINE_BYTES].decode(errors="replace") for line in whole if line)
            yield None
    if pending:
        yield pending.decode(errors="replace")
    while process.poll() is None:
        yield None
        time.sleep(_TICK_S)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM act at the end of the block: within Popen they would leave a process nobody knows."""
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = [int(child) for child in (task / "children").read_text(encoding="ascii").split()]
        except OSError:
            continue  # The thread has ended since the directory was listed.
        for child in children:
            found += [child, *descendants(child)]
    return found


def end_tree(process: subprocess.Popen[bytes], grace_s: float = TERMINATION_S) -> None:
    """SIGTERM to the process and its group, which it must lead (`start_new_session=True`); SIGKILL to whatever is left.
    torchrun puts each worker into a session of its own, so that only torchrun itself can end them in order."""
    below = descendants(process.pid)
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(grace_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C: the user does not want to wait
        below += descendants(process.pid)
        process.kill()
        process.wait()
    for pid in below:
        with suppress(ProcessLookupError):  # it may have ended with its parent
            os.kill(pid, signal.SIGKILL)
    _signal_group(process.pid, signal.SIGKILL)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # the last process of the group may have ended
        os.killpg(leader, number)


def last_words(lines: Iterable[str]) -> list[str]:
    """Those of the ranks, which come after torchrun's banner and before its own long report of them."""
    lines = list(lines)
    report = next((number for number, line in enumerate(lines) if _TORCHRUN_LOG.match(line)), len(lines))
    ranks = [line for line in lines[:report] if not _TORCHRUN_BANNER.fullmatch(line)]
    return ranks[-LAST_LINES:] or lines[-LAST_LINES:]


def ended_with(lines: Iterable[str]) -> str:
    """The last words as part of an error message."""
    words = last_words(lines)
    return "It ended with:\n" + "\n".join(f"  {line}" for line in words) if words else "It wrote nothing."
