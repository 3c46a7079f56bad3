"""What raw TCP's session asks of its two drivers: memory, and how much of it at every size."""

from __future__ import annotations

from collections import deque

import pytest

from bagua.net.bench.endpoint import Event
from bagua.net.bench.errors import BenchError
from bagua.net.bench.ring.sessions import RawSession
from bagua.net.bench.sample import Case
from bagua.net.bench.settings import RAW, DriverRequest

LARGEST = 64 << 20
MEMORY_OF_LARGEST = 2 * 8 << 20  # two channels, eight slots of 1 MiB


class RecordingEnd:
    """Answers like a driver of raw mode, a second and three CPU seconds a run."""

    def __init__(self, request: DriverRequest) -> None:
        self.name = request.title
        self.lines: list[str] = []
        listening: list[Event] = [{"event": "listening", "address": "127.0.0.1:9"}] if request.role == "server" else []
        self._events: deque[Event] = deque([*listening, {"event": "connected"}])

    def fileno(self) -> int:
        raise AssertionError("there is always an answer")

    def post(self, line: str) -> None:
        self.lines.append(line)
        self._events.append(
            {"event": "result", "bytes": int(line.split()[1]), "seconds": 1.0, "cpu_user_s": 1.0, "cpu_system_s": 2.0}
        )

    def next_event(self) -> Event | None:
        return self._events.popleft()

    def close(self) -> None:
        pass


class RecordingPlace:
    def __init__(self) -> None:
        self.requests: list[DriverRequest] = []
        self.ends: list[RecordingEnd] = []

    def start(self, request: DriverRequest) -> RecordingEnd:
        self.requests.append(request)
        self.ends.append(RecordingEnd(request))
        return self.ends[-1]

    def close(self, *, failed: bool) -> None:
        raise AssertionError("a session does not end its places")


@pytest.fixture
def place() -> RecordingPlace:
    return RecordingPlace()


@pytest.fixture
def session(place: RecordingPlace) -> RawSession:
    session = RawSession(2, (1, place), (0, place), ranks=2, channels=2, largest_bytes=LARGEST)
    session.connect(timeout_s=5)
    return session


@pytest.mark.usefixtures("session")
def test_both_ends_keep_the_memory_of_the_ring_at_the_largest_size(place: RecordingPlace) -> None:
    server, client = place.requests
    assert (server.role, server.rank, server.memory_bytes) == ("server", 1, MEMORY_OF_LARGEST)
    assert (client.role, client.rank, client.memory_bytes) == ("client", 0, MEMORY_OF_LARGEST)
    assert client.connect == "127.0.0.1:9"


def test_a_run_moves_the_memory_of_a_ring_again_and_again(session: RawSession, place: RecordingPlace) -> None:
    sample = session.run(Case("one_way", 1 << 20), iterations=10, warmup=3, timeout_s=5)
    session.run(Case("one_way", LARGEST), iterations=1, warmup=0, timeout_s=5)
    for end in place.ends:
        # 1 MiB: two channels, eight slots each, of the 256 KiB that a rank and a channel have of it.
        assert end.lines == [
            f"run {3 << 20} {4 << 20}",
            f"run {10 << 20} {4 << 20}",
            f"run {LARGEST} {MEMORY_OF_LARGEST}",
        ]
    assert (sample.iterations, sample.moved_bytes) == (10, 10 << 20)
    assert (sample.seconds, sample.cpu_seconds) == (pytest.approx(0.1), 6.0)


@pytest.mark.parametrize(
    ("backend", "role", "memory"), [(RAW, "server", 0), (RAW, "server", -1), ("bare", "ring", LARGEST)]
)
def test_memory_is_what_raw_alone_is_started_with(backend: str, role: str, memory: int) -> None:
    with pytest.raises(BenchError, match=f"{backend!r} cannot be started with {memory} B of memory"):
        DriverRequest(backend, 0, 2, role, memory_bytes=memory)
