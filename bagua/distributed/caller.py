"""Ends this process when its caller ends: over ssh without a terminal, a closed stdin is all that tells of it."""

from __future__ import annotations

import os
import signal
import threading


def end_with_caller() -> None:
    """Sends this process SIGTERM once its stdin is closed. Its children get an empty stdin."""
    watched = os.dup(0)
    with open(os.devnull) as nothing:  # noqa: PTH123 - a descriptor is needed
        os.dup2(nothing.fileno(), 0)
    threading.Thread(target=_watch, args=(watched,), name="bagua-caller", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
