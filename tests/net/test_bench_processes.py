"""One driver process: its failures become errors within seconds, and it never outlives its owner. A command that is
ended while it starts another one leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fake_driver import install_fake_driver
from support.processes import is_alive

from bagua.command_exit import sigterm_as_interrupt
from bagua.net.bench.errors import BenchError
from bagua.net.bench.process_tree import running, start_command
from bagua.net.bench.processes import DriverProcess, ask, gather

DEADLINE_S = 60.0
ARGUMENTS = ["ring", "--transport", "bare", "--rank", "0", "--nranks", "2", "--channels", "1"]


@contextmanager
def driver(folder: Path, fault: dict[str, object] | None = None) -> Iterator[DriverProcess]:
    environment = dict(os.environ)
    if fault is not None:
        environment["FAKE_DRIVER_FAULT"] = json.dumps(fault)
    process = DriverProcess("bare rank 0", [str(install_fake_driver(folder)), *ARGUMENTS], environment)
    try:
        yield process
    finally:
        process.close()
    assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("kill", r"was killed by SIGKILL.*run out of memory: lower -e/--maxbytes"),
        ("garbage", "sent b'this is no JSON', which is no JSON object"),
        ("other_event", "answered 'surprise' where 'result' was expected.*reinstall"),
        ("hang", r"no answer from bare rank 0 within 1 s while at 'run' .run 8 1 0..*--timeout"),
    ],
)
def test_each_failure_has_its_message(tmp_path: Path, kind: str, message: str) -> None:
    with driver(tmp_path, {"at": "run", "do": kind}) as process:
        gather([process], "listening", DEADLINE_S, "starting")
        with pytest.raises(BenchError, match=message):
            ask([process], "run 8 1 0", "result", 1 if kind == "hang" else DEADLINE_S)


def test_a_driver_that_ignores_quit_is_killed(tmp_path: Path) -> None:
    with driver(tmp_path, {"at": "quit", "do": "hang"}) as process:
        gather([process], "listening", DEADLINE_S, "starting")
        began = time.monotonic()
        process.close()
        taken = time.monotonic() - began
        assert not is_alive(process.pid)
        # It was given the time to end by itself, and no more: it would sleep for an hour.
        assert 1 < taken < DEADLINE_S


def test_a_missing_program_is_named() -> None:
    with pytest.raises(BenchError, match=r"'/no/driver' cannot be started .No such file.*reinstall bagua"):
        DriverProcess("bare rank 0", ["/no/driver"], {})


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
