"""Signals and cleaning up: SIGTERM and SIGHUP unwind the stack as exceptions do, and cannot interrupt the clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_UNWINDING = (signal.SIGTERM, signal.SIGHUP)
_DEFERRED = (signal.SIGINT, *_UNWINDING)


def _unwind(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class TerminationGuard:
    """While installed, SIGTERM and SIGHUP raise SystemExit, so that `with` blocks clean up. Only in the main thread,
    where Python runs handlers, and only over the default action: a program's own handler stays."""

    def __init__(self) -> None:
        self._installed: list[signal.Signals] = []

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _UNWINDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _unwind)
                self._installed.append(number)

    def uninstall(self) -> None:
        for number in self._installed:
            signal.signal(number, signal.SIG_DFL)
        self._installed.clear()


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Signals that arrive meanwhile are delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
