"""The bytes of a statistics page, as net_plugin/stats/page_layout.h defines them. Nothing in a page is trusted: whoever
runs the process can write anything there, and root reads the pages of all users."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import ClassVar, Self

from bagua.net.stats.errors import StatsError
from bagua.net.stats.quantities import printable

MAGIC = b"BAGUANET"
VERSION = 4

HEADER_BYTES = 1856
COMM_BYTES = 640
STREAM_BYTES = 192
COMM_SLOTS = 2048
STREAM_SLOTS = 8192
NIC_SLOTS = 16
COMMS_OFFSET = HEADER_BYTES
STREAMS_OFFSET = COMMS_OFFSET + COMM_SLOTS * COMM_BYTES

# Upper bounds of the classes of message sizes in bytes; the last class has none.
SIZE_CLASSES = (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)

_PREFIX = struct.Struct("=8sI5I")
_PROCESS = struct.Struct("=qqqiiiI64s64s")
_USE = struct.Struct("=QIIQQQQ256s")
_PROCESS_OFFSET = _PREFIX.size
_USE_OFFSET = 200
_CLOSED_COMMS_OFFSET = 504
_CLOSED_STREAMS_OFFSET = 672
_COMM = struct.Struct("=6IQ56s128s")
_REQUESTS = struct.Struct("=64I")
_COMM_COUNTERS_OFFSET = 216
_REQUESTS_OFFSET = 384
_STREAM = struct.Struct("=4I")
_SAMPLE = struct.Struct("=5Q")
_NIC = struct.Struct("=4I3Q24s")
_NICS_OFFSET = 832
_STREAM_COUNTERS_OFFSET = 16
_SAMPLE_OFFSET = 136

_COMM_STATES = {1: "open", 2: "failed"}
_DIRECTIONS = {0: "send", 1: "receive"}
_NIC_STATES = {0: None, 1: "up", 2: "removed", 3: "down", 4: "no carrier", 5: "no address"}
_STREAM_STATES = {1: "live", 2: "parked", 3: "ended", 4: "lost"}


@dataclass(frozen=True)
class _Counters:
    FORMAT: ClassVar[struct.Struct]

    @classmethod
    def read(cls, page: bytes, offset: int) -> Self:
        return cls(*cls.FORMAT.unpack_from(page, offset))

    def plus(self, other: Self) -> Self:
        return type(self)(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class StreamCounters(_Counters):
    FORMAT = struct.Struct("=15Q")

    bytes: int
    chunks: int
    zero_copy_bytes: int
    full: int
    deferred: int
    worker_waits: int
    worker_wait_ns: int
    parked: int
    parked_ns: int
    checksum_errors: int
    resent_chunks: int
    retransmits: int
    busy_us: int
    peer_window_us: int
    socket_buffer_us: int


@dataclass(frozen=True)
class CommCounters(_Counters):
    FORMAT = struct.Struct("=21Q")

    inline_messages: int
    inline_bytes: int
    striped_messages: int
    striped_bytes: int
    received_messages: int
    received_bytes: int
    size_0: int
    size_1: int
    size_2: int
    size_3: int
    size_4: int
    size_5: int
    size_6: int
    size_7: int
    size_8: int
    handed_to_awake: int
    handed_to_asleep: int
    kept_from_asleep: int
    wake_ups: int
    streams_joined: int
    streams_lost: int

    @property
    def messages(self) -> int:
        return self.inline_messages + self.striped_messages + self.received_messages

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, f"size_{number}") for number in range(len(SIZE_CLASSES) + 1))


@dataclass(frozen=True)
class StreamSlot:
    comm: int
    index: int
    nic: int | None  # its place in Page.nics; None: none, as within a host
    state: str
    counters: StreamCounters
    sampled_ms: int  # monotonic clock; 0: never
    round_trip_us: int
    least_round_trip_us: int
    estimated_bytes_per_s: int
    bytes_over_other_nics: int  # of its bytes


@dataclass(frozen=True)
class NicSlot:
    name: str
    state: str | None  # up, removed, down, no carrier, no address; None: nothing watches it
    since_ms: int  # of the state; monotonic clock; 0: from the beginning
    speed_mbps: int  # 0: unknown
    downs: int  # times that it became unusable
    streams_lost: int
    closed_sent_bytes: int  # of streams that are closed or were replaced over another NIC
    closed_received_bytes: int


@dataclass(frozen=True)
class CommSlot:
    slot: int
    state: str
    direction: str
    same_host: bool
    streams_target: int
    growth_trials: int
    growth_gains: int
    opened_ms: int  # monotonic clock
    interface: str
    peer: str
    counters: CommCounters
    posted_ms: tuple[int, ...]  # of outstanding requests; monotonic clock modulo 2^32


@dataclass(frozen=True)
class Page:
    pid: int  # as the process itself sees it
    started_unix_ms: int
    started_ms: int  # monotonic clock
    rank: int  # -1: unknown, the next two as well
    local_rank: int
    world_size: int
    workers: int
    plugin_version: str
    host: str
    generation: int
    comms_opened: int
    comms_hidden: int
    comms_failed: int
    last_failure_ms: int
    last_failure: str
    closed_comms: CommCounters
    closed_streams: StreamCounters
    comms: tuple[CommSlot, ...]
    streams: tuple[StreamSlot, ...]
    nics: tuple[NicSlot | None, ...]  # by slot; None: it is free


def slots_in_use(header: bytes, where: str) -> tuple[int, int]:
    """How many slots of comms and streams are to be read, after a check of everything that their places depend on.

    Raises:
        StatsError: it is not a page, or one of another version.
    """
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise StatsError(
            f"{where} has no complete statistics page.\n"
            "It is starting, or something else made a file of that name.\nTry again."
        )
    _, version, *sizes = _PREFIX.unpack_from(header)
    expected = [HEADER_BYTES, COMM_SLOTS, COMM_BYTES, STREAM_SLOTS, STREAM_BYTES]
    if version != VERSION or sizes != expected:
        plugin = _text(_PROCESS.unpack_from(header, _PROCESS_OFFSET)[7])
        raise StatsError(
            f"{where} has a statistics page of version {version}; this bagua-net reads version {VERSION}.\n"
            f"The process uses Bagua-Net {plugin or 'of an unknown version'}.\n"
            "Run the bagua-net of the environment in which the process was started."
        )
    _, comms, streams, *_ = _USE.unpack_from(header, _USE_OFFSET)
    return min(comms, COMM_SLOTS), min(streams, STREAM_SLOTS)


def generation_of(header: bytes) -> int:
    """Odd: a change is under way."""
    return int(_USE.unpack_from(header, _USE_OFFSET)[0])


def read_page(header: bytes, comms: bytes, streams: bytes) -> Page:
    """Of a header that `slots_in_use` has checked, and the slots that it named."""
    pid, unix_ms, started_ms, rank, local_rank, world_size, workers, version, host = _PROCESS.unpack_from(
        header, _PROCESS_OFFSET
    )
    generation, _, _, opened, hidden, failed, failure_ms, failure = _USE.unpack_from(header, _USE_OFFSET)
    read_comms = (_comm(comms, slot) for slot in range(len(comms) // COMM_BYTES))
    read_streams = (_stream(streams, slot) for slot in range(len(streams) // STREAM_BYTES))
    return Page(
        pid=pid,
        started_unix_ms=unix_ms,
        started_ms=started_ms,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        workers=workers,
        plugin_version=_text(version),
        host=_text(host),
        generation=generation,
        comms_opened=opened,
        comms_hidden=hidden,
        comms_failed=failed,
        last_failure_ms=failure_ms,
        last_failure=_text(failure),
        closed_comms=CommCounters.read(header, _CLOSED_COMMS_OFFSET),
        closed_streams=StreamCounters.read(header, _CLOSED_STREAMS_OFFSET),
        comms=tuple(comm for comm in read_comms if comm is not None),
        streams=tuple(stream for stream in read_streams if stream is not None),
        nics=tuple(_nic(header, slot) for slot in range(NIC_SLOTS)),
    )


def _comm(data: bytes, slot: int) -> CommSlot | None:
    begin = slot * COMM_BYTES
    state, direction, same_host, target, trials, gains, opened, interface, peer = _COMM.unpack_from(data, begin)
    if state not in _COMM_STATES or direction not in _DIRECTIONS:
        return None
    posted = _REQUESTS.unpack_from(data, begin + _REQUESTS_OFFSET)
    return CommSlot(
        slot=slot,
        state=_COMM_STATES[state],
        direction=_DIRECTIONS[direction],
        same_host=same_host != 0,
        streams_target=target,
        growth_trials=trials,
        growth_gains=gains,
        opened_ms=opened,
        interface=_text(interface),
        peer=_text(peer),
        counters=CommCounters.read(data, begin + _COMM_COUNTERS_OFFSET),
        posted_ms=tuple(one for one in posted if one != 0),
    )


def _stream(data: bytes, slot: int) -> StreamSlot | None:
    begin = slot * STREAM_BYTES
    state, comm, index, nic = _STREAM.unpack_from(data, begin)
    if state not in _STREAM_STATES:
        return None
    return StreamSlot(
        comm,
        index,
        nic - 1 if 0 < nic <= NIC_SLOTS else None,
        _STREAM_STATES[state],
        StreamCounters.read(data, begin + _STREAM_COUNTERS_OFFSET),
        *_SAMPLE.unpack_from(data, begin + _SAMPLE_OFFSET),
    )


def _nic(header: bytes, slot: int) -> NicSlot | None:
    state, speed_mbps, downs, lost, since_ms, sent, received, name = _NIC.unpack_from(
        header, _NICS_OFFSET + slot * _NIC.size
    )
    if not name.strip(b"\0") or state not in _NIC_STATES:
        return None
    return NicSlot(_text(name), _NIC_STATES[state], since_ms, speed_mbps, downs, lost, sent, received)


def _text(field: bytes) -> str:
    return printable(field.split(b"\0", 1)[0].decode(errors="replace"))
