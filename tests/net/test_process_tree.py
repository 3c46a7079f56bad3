"""A command that is ended while it starts another one leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from bagua.command_exit import sigterm_as_interrupt
from bagua.net.bench.process_tree import running, start_command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_is_being_started_ends_it(number: signal.Signals) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(start_command(["sleep", "600"], os.environ, RuntimeError))
        signal.raise_signal(number)
        return started[0]

    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), running(start):
        pass
    assert started[0].poll() is not None
