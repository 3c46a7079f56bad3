"""One driver process: its failures become errors within seconds, and it never outlives its owner."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.fake_driver import install_fake_driver
from support.processes import is_alive, wait_until

from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import ask, gather
from bagua.net.bench.errors import BenchError

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


def test_question_and_answer(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        (listening,) = gather([process], "listening", DEADLINE_S, "starting")
        assert listening["handles"] == ["0000"]
        (result,) = ask([process], "run 1000 3 1", "result", DEADLINE_S)
        assert result["seconds"] == pytest.approx([11e-6] * 3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("exit", r"bare rank 0 .pid \d+. exited with code 3 .*its last words: fake driver: gave up"),
        ("kill", r"was killed by SIGKILL.*run out of memory: lower -e/--maxbytes"),
        ("error", "bare rank 0 failed while at 'run'.*injected: the peer 10.0.0.9"),
        ("garbage", "sent b'this is no JSON', which is no JSON object"),
        ("list", r"sent b'\[1, 2\]'"),
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


def test_a_question_to_a_dead_driver_does_not_raise_but_its_answer_does(tmp_path: Path) -> None:
    with driver(tmp_path, {"at": "start", "do": "exit"}) as process:
        wait_until(lambda: not is_alive(process.pid), "the driver's end", DEADLINE_S)
        process.post("run 8 1 0")
        with pytest.raises(BenchError, match="exited with code 3"):
            gather([process], "result", DEADLINE_S, "waiting")


def test_one_failure_ends_the_wait_for_all(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        driver(tmp_path / "a", {"at": "run", "do": "hang"}) as hung,
        driver(tmp_path / "b", {"at": "run", "do": "exit"}) as dead,
    ):
        gather([hung, dead], "listening", DEADLINE_S, "starting")
        with pytest.raises(BenchError, match="exited with code 3"):
            ask([hung, dead], "run 8 1 0", "result", DEADLINE_S)
        hung.kill()


def test_a_missing_program_is_named() -> None:
    with pytest.raises(BenchError, match=r"'/no/driver' cannot be started .No such file.*reinstall bagua"):
        DriverProcess("bare rank 0", ["/no/driver"], {})


def test_close_can_be_called_again(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        process.close()
        process.close()
