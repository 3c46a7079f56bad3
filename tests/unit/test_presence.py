"""Which processes are proven to be gone, and which only seem to be: stopped, busy, forked, behind lost connections."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.labs import Lab, needs_lab
from support.processes import PATIENCE_S, wait_until
from support.ranks import run_ranks

from bagua.job import peer_watch, presence
from bagua.job.peer_watch import PeerWatch, reach
from bagua.job.presence import Door, Presence, own_presence


class Watched:
    """What a watch has found, with attempts of a second."""

    def __init__(self, door: Door, attempts: int = 6) -> None:
        self.found: list[str] = []
        self.watch = PeerWatch(door, "rank 1 (host b)", self.found.append, bool, attempt_s=1, attempts=attempts)

    def connection(self) -> socket.socket | None:
        return self.watch._connection

    def lose_connection(self) -> None:
        """As a router that forgets it; returns once there is another one."""
        before = self.connection()
        assert before is not None
        before.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: self.connection() not in (None, before), "another connection")


# --- processes on one machine -----------------------------------------------------------------------------------------

FATES = ("watches", "is killed", "is stopped", "holds the GIL", "is killed, and has a child", "leaves")


def meet_fate(folder: str) -> list[Any]:
    rank = int(os.environ["RANK"])
    if rank == 0:
        return watch_all(Path(folder))
    own = own_presence()
    assert own is not None
    own.doing = lambda: "summing"
    path = Path(folder, str(rank))
    go, end = path.with_suffix(".go"), path.with_suffix(".end")
    os.mkfifo(go)
    os.mkfifo(end)
    if FATES[rank] == "is killed, and has a child" and os.fork() == 0:
        end.read_bytes()
        os._exit(0)
    path.with_suffix(".new").write_text(json.dumps([os.getpid(), own.door]))
    path.with_suffix(".new").rename(path)
    with go.open("rb") as file:
        if FATES[rank] == "holds the GIL":
            ctypes.PyDLL(None).read(file.fileno(), ctypes.create_string_buffer(1), 1)
            return []
        file.read(1)
    if FATES[rank] == "leaves":
        presence._leave()
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP if FATES[rank] == "is stopped" else signal.SIGKILL)
    return []


def watch_all(folder: Path) -> list[Any]:
    return [watch_one(folder / str(rank), fate) for rank, fate in enumerate(FATES[1:], 1)]


def watch_one(path: Path, fate: str) -> list[str]:
    wait_until(path.exists, fate)
    pid, (addresses, port, token) = json.loads(path.read_text())
    door = Door(tuple(addresses), port, token)

    def state() -> tuple[str, str]:
        answer = reach(door.addresses[-1], door, 0.5)
        if answer.connection is not None:
            answer.connection.close()
        return answer.state, answer.doing

    one = Watched(door)
    wait_until(lambda: one.connection() is not None, "the connection")
    one.lose_connection()
    wait_until(lambda: state() == ("here", "summing"), fate)
    with path.with_suffix(".go").open("wb", buffering=0) as go:
        if fate == "holds the GIL":
            wait_until(lambda: state() == ("mute", ""), fate)
            one.lose_connection()
        go.write(b"x")
    if fate == "is stopped":
        wait_until(lambda: state() == ("mute", ""), fate)
        one.lose_connection()
    elif fate != "holds the GIL":
        one.watch._thread.join(PATIENCE_S)
        assert not one.watch._thread.is_alive()
    one.watch.stop()
    if fate == "is stopped":
        os.kill(pid, signal.SIGKILL)
    elif fate == "is killed, and has a child":
        path.with_suffix(".end").write_bytes(b"")
    return one.found


def test_what_is_proven_of_processes(tmp_path: Path) -> None:
    found = run_ranks(len(FATES), meet_fate, str(tmp_path), expect_death={1, 2, 4, 5}, timeout=200)[0]
    assert dict(zip(FATES[1:], found, strict=True)) == {
        "is killed": ["exited"],
        "is stopped": [],
        "holds the GIL": [],
        "is killed, and has a child": ["exited"],
        "leaves": [],
    }


def test_another_process_at_the_port_proves_the_end_of_the_one_that_had_it() -> None:
    theirs = Presence()
    one = Watched(theirs.door)
    wait_until(lambda: one.connection() is not None, "the connection")
    connection = one.connection()
    assert connection is not None
    theirs.door = theirs.door._replace(token="of the other process")
    connection.shutdown(socket.SHUT_RDWR)
    one.watch._thread.join(PATIENCE_S)
    one.watch.stop()
    assert one.found == ["exited"]
    theirs.leave()
    theirs.close()


def test_a_process_that_closes_its_port_last_is_found_to_be_gone_without_a_pause() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        door = Door(("127.0.0.1",), server.getsockname()[1], "token")
        found: list[str] = []
        watch = PeerWatch(door, "rank 1 (host b)", found.append, bool, attempt_s=3600, attempts=6)
        connection, _ = server.accept()
        connection.send(b'["token", ""]\n')
        connection.close()
        again, _ = server.accept()  # the port is open still
        again.close()
    wait_until(lambda: found == ["exited"], "the proof")
    watch.stop()


def test_a_port_that_was_never_reached_proves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for door in (Door(("127.0.0.1",), port, "token"), Door((), 1, "")):
            one = Watched(door, attempts=1)
            one.watch._thread.join(PATIENCE_S)
            assert not one.watch._thread.is_alive()
            assert one.found == []


def test_a_process_that_does_not_answer_at_first_is_watched_all_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        theirs.settimeout(PATIENCE_S)
        one = Watched(Door(("127.0.0.1",), theirs.getsockname()[1], "token"))
        theirs.accept()[0].close()
        with theirs.accept()[0] as connection:
            connection.sendall(b'["token", ""]\n')
            wait_until(lambda: one.connection() is not None, "the connection")
            one.watch.stop()
    assert one.found == []


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(peer_watch._logger, "warning", told.append)
    return told


@contextlib.contextmanager
def two_machines(ip_version: int, attempts: int = 6) -> Iterator[tuple[Watched, Callable[[str], Any]]]:
    """A watch on one of the presence of the other, and what sets the link of that one up or down."""
    with Lab(ip_versions=(ip_version,)) as lab:
        with lab.inside(1):
            theirs = Presence()
        with lab.inside(0):
            one = Watched(theirs.door, attempts)
        try:
            wait_until(lambda: one.connection() is not None, "the connection")
            yield one, lambda state: lab.run(1, ["ip", "link", "set", "eth0", state], check=True)
        finally:
            one.watch.stop()
            theirs.leave()
            theirs.close()


@needs_lab
@pytest.mark.parametrize("ip_version", [4, 6])
def test_a_machine_that_falls_silent_is_named_and_then_gone(lines: list[str], ip_version: int) -> None:
    with two_machines(ip_version) as (one, set_link):
        set_link("down")
        one.watch._thread.join(PATIENCE_S)
        assert one.found == ["has answered no TCP packet for 6 s"]
    (line,) = lines
    assert re.match(r"rank 1 \(host b\) has answered no TCP packet for \d s: its machine or the network is down", line)


@needs_lab
def test_a_network_that_comes_back_ends_nothing(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # It may take a busy machine as long as that to set the link up again.
    monkeypatch.setattr(peer_watch, "CONFIRMING_ATTEMPTS", 60)
    with two_machines(4, attempts=62) as (one, set_link):
        set_link("down")
        wait_until(lambda: bool(lines), "the log line")
        set_link("up")
        wait_until(lambda: lines[-1].endswith("answers again."), "the answer")
        assert one.found == []
