"""How fast raw TCP is between the two ends, each way, over 1, 4 and 16 connections: the drivers of bagua-net-bench."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bagua.net.bench.errors import BenchError, ConnectionLostError
from bagua.net.bench.measurement import Case
from bagua.net.bench.processes import Place
from bagua.net.bench.ring.sessions import RawSession
from bagua.net.bench.turns import rotated
from bagua.progress import Progress

STREAMS = (1, 4, 16)
REPETITIONS = 3
# Small, and several for each connection: at the end of a transfer some have nothing left to send.
_WRITE_BYTES = 64 << 10
_MIN_WRITES = 4
_MAX_BYTES = 64 << 30
# One part more goes ahead: after a pause a network with token buckets lets a burst pass, and TCP starts slowly.
_PARTS = 2
_CHANNELS = 2
# Of a message of the ring whose memory a transfer uses: slices of full size.
_LARGEST_BYTES = 4 << 20
# Connecting is a few round trips; after this long, something drops them.
_CONNECT_S = 8.0
_RUN_S = 30.0
# The clock of a transfer includes a round trip.
_ROUND_TRIPS = 20
_MAX_TRANSFER_S = 5.0

SENT, RECEIVED = "sent", "received"  # as seen from the asking end


@dataclass(frozen=True)
class Rate:
    """Of one direction and number of streams: payload, in bytes per second.

    Attributes:
        cpus: CPUs that both ends kept busy, together.
    """

    direction: str
    streams: int
    median: float
    low: float
    high: float
    cpus: float


@dataclass
class Bandwidth:
    """
    Attributes:
        failed: by direction, why no connection could be opened.
    """

    rates: list[Rate] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def of(self, direction: str) -> dict[int, Rate]:
        return {rate.streams: rate for rate in self.rates if rate.direction == direction}


def measure_bandwidth(
    here: Place,
    there: Place,
    transfer_s: float,
    round_trip_s: float,
    progress: Progress,
    counts: Sequence[int] = STREAMS,
    addresses: tuple[str, str] = ("", ""),
) -> Bandwidth:
    """
    Args:
        transfer_s: how long a transfer should take.
        addresses: of the two ends; "": those of their places.
    """
    found = Bandwidth()
    transfer_s = min(max(transfer_s, _ROUND_TRIPS * round_trip_s), _MAX_TRANSFER_S)
    pairs = {
        SENT: {"server": (1, there), "client": (0, here)},
        RECEIVED: {"server": (0, here), "client": (1, there)},
    }
    for direction, ends in pairs.items():
        try:
            listen = addresses[ends["server"][0]]
            sessions = [_connected(streams, ends, listen) for streams in counts]
        except ConnectionLostError:
            raise
        except BenchError as error:
            found.failed[direction] = str(error)
        else:
            found.rates += _measure(direction, sessions, transfer_s, progress)
    return found


def _connected(streams: int, ends: Mapping[str, tuple[int, Place]], listen: str) -> RawSession:
    session = RawSession(streams, ends["server"], ends["client"], 2, _CHANNELS, _LARGEST_BYTES, _WRITE_BYTES, listen)
    session.connect(_CONNECT_S)
    return session


def _measure(direction: str, sessions: Sequence[RawSession], transfer_s: float, progress: Progress) -> list[Rate]:
    sizes = {}
    for session in sessions:
        progress.advance(f"{direction}, {session.name}")
        sizes[session.name] = _size_for(session, transfer_s)
    seconds: dict[str, list[float]] = {session.name: [] for session in sessions}
    cpus: dict[str, list[float]] = {session.name: [] for session in sessions}
    for repetition in range(REPETITIONS):
        for session in rotated(sessions, repetition):
            progress.advance(f"{direction}, {session.name}")
            sample = session.run(Case("one_way", sizes[session.name] // _PARTS), _PARTS, 1, _RUN_S)
            seconds[session.name].append(sample.seconds * _PARTS)
            cpus[session.name].append(sample.cpu_seconds / (sample.seconds * _PARTS))
    return [
        _rate(direction, session.streams, sizes[session.name], seconds[session.name], cpus[session.name])
        for session in sessions
    ]


def _size_for(session: RawSession, transfer_s: float) -> int:
    """Bytes that take about `transfer_s`. It grows step by step: TCP starts slowly."""
    size = least = session.streams * _MIN_WRITES * _WRITE_BYTES
    while True:
        seconds = session.run(Case("one_way", size), 1, 0, _RUN_S).seconds
        wanted = int(size / seconds * transfer_s)
        if wanted <= 2 * size or size >= _MAX_BYTES:
            return max(least, min(wanted, _MAX_BYTES))
        size = min(wanted, 16 * size)


def _rate(direction: str, streams: int, size: int, seconds: Sequence[float], cpus: Sequence[float]) -> Rate:
    return Rate(
        direction,
        streams,
        size / statistics.median(seconds),
        size / max(seconds),
        size / min(seconds),
        statistics.median(cpus),
    )


def progress_steps(counts: Sequence[int] = STREAMS) -> int:
    return 2 * len(counts) * (1 + REPETITIONS)
