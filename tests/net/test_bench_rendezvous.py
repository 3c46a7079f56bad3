"""How launched ranks meet: the handshake, strangers, duplicates, absent ranks, a port in use."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LaunchEnvironment
from bagua.net.bench.rendezvous import LineConnection, Member, join, listen, meet, proof


def make_launch(rank: int, world_size: int = 3, port: int = 0, job: str = "job-1") -> LaunchEnvironment:
    return LaunchEnvironment("torchrun", rank, world_size, None, None, "127.0.0.1", port, job)


class Meeting:
    """Rank 0 in a thread, on a port that the kernel chose."""

    def __init__(self, world_size: int = 3, timeout_s: float = 10.0) -> None:
        self.listener = listen(make_launch(0, world_size))
        self.port = int(self.listener.getsockname()[1])
        self.said: list[str] = []
        self.members: list[Member] = []
        self.error: BenchError | None = None
        self._launch = make_launch(0, world_size, self.port)
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._meet)
        self._thread.start()

    def _meet(self) -> None:
        try:
            self.members = meet(self._launch, self._timeout_s, self.said.append, self.listener)
        except BenchError as error:
            self.error = error

    def finish(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        for member in self.members:
            if member.connection is not None:
                member.connection.close()


def in_thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_all_ranks_meet_and_learn_how_many_share_the_host() -> None:
    meeting = Meeting()
    joined: dict[int, tuple[LineConnection, int]] = {}

    def come(rank: int) -> None:
        joined[rank] = join(make_launch(rank, port=meeting.port), 10)

    threads = [in_thread(lambda rank=rank: come(rank)) for rank in (2, 1)]  # type: ignore[misc]
    for thread in threads:
        thread.join(60)
    assert {rank: local for rank, (_, local) in joined.items()} == {1: 3, 2: 3}
    deadline = time.monotonic() + 10
    while not meeting.members:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [member.rank for member in meeting.members] == [0, 1, 2]
    one = meeting.members[1].connection
    assert one is not None
    assert one.local_address == "127.0.0.1"  # not ::ffff:127.0.0.1
    one.send({"hello": "x" * 100_000})
    assert joined[1][0].receive(10) == {"hello": "x" * 100_000}
    assert joined[1][0].receive(0) is None
    one.close()
    with pytest.raises(BenchError, match=r"connection to rank 0 at 127\.0\.0\.1.* is lost"):
        joined[1][0].receive(10)
    meeting.finish()
    for connection, _ in joined.values():
        connection.close()


def test_strangers_are_turned_away_and_disturb_nobody() -> None:
    meeting = Meeting(world_size=2)
    with socket.create_connection(("127.0.0.1", meeting.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
        other_job = make_launch(1, 2, meeting.port, job="job-2")
        with pytest.raises(BenchError, match="is lost"):
            join(other_job, 10)
        connection, _ = join(make_launch(1, 2, meeting.port), 10)
    meeting.finish()
    assert meeting.error is None
    assert len(meeting.members) == 2
    assert sum("which is not a rank of this run" in text for text in meeting.said) == 2
    connection.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 5}, "rank 5 of 2 came to a run of 2 ranks"),
        ({"world_size": 4}, "rank 1 of 4 came to a run of 2 ranks"),
    ],
)
def test_a_misnumbered_rank_ends_both_sides_with_the_reason(changes: dict[str, int], message: str) -> None:
    meeting = Meeting(world_size=2)
    with pytest.raises(BenchError, match=f"turned this rank away: {message}; start all ranks from one launcher"):
        join(replace(make_launch(1, 2, meeting.port), **changes), 10)
    meeting.finish()
    assert message in str(meeting.error)


def test_a_second_process_of_the_same_rank_is_refused() -> None:
    meeting = Meeting(world_size=3)
    errors: list[str] = []

    def come() -> None:
        try:
            join(make_launch(1, 3, meeting.port), 10)
        except BenchError as error:
            errors.append(str(error))

    threads = [in_thread(come), in_thread(come)]
    for thread in threads:
        thread.join(60)
    meeting.finish()
    assert "a second rank 1" in str(meeting.error)
    assert any("a second rank 1" in error for error in errors)


def test_another_version_is_refused() -> None:
    meeting = Meeting(world_size=2)
    with socket.create_connection(("127.0.0.1", meeting.port)) as raw:
        connection = LineConnection(raw, "rank 0", 10)
        greeting = connection.receive(10)
        assert greeting is not None
        hello = {"rank": 1, "ranks": 2, "host": "h", "identity": "i", "network": "n", "version": "0.0.1"}
        connection.send(hello | {"proof": proof("job-1", str(greeting["nonce"]), 1)})
        answer = connection.receive(10)
    assert answer is not None
    assert "rank 1 has bagua 0.0.1 and rank 0 has" in str(answer["error"])
    meeting.finish()


def test_absent_ranks_are_named_in_time() -> None:
    meeting = Meeting(world_size=3, timeout_s=3.0)
    with pytest.raises(BenchError, match=r"turned this rank away: 1 of 3 ranks \(rank 1\) did not reach port"):
        join(make_launch(2, 3, meeting.port), 10)
    meeting.finish()
    assert "1 of 3 ranks (rank 1) did not reach port" in str(meeting.error)
    assert "--port" in str(meeting.error)
    assert any("for 2 more ranks" in text or "for 1 more ranks" in text for text in meeting.said)


def test_rank_zero_that_never_comes_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(BenchError, match=rf"rank 0 at 127.0.0.1:{port} cannot be reached within 1 s"):
        join(make_launch(1, port=port), 1)


def test_another_server_on_the_port_is_recognised() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def answer() -> None:
            accepted, _ = other.accept()
            with accepted:
                accepted.sendall(json.dumps({"magic": "something else"}).encode() + b"\n")

        thread = in_thread(answer)
        with pytest.raises(BenchError, match="is no bagua-net-bench; give --port"):
            join(make_launch(1, port=port), 60)
        thread.join(60)
