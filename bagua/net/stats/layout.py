"""The bytes of a statistics page, as net_plugin/stats/page_layout.h defines them. Nothing in a page is trusted: whoever
runs the process can write anything there, and root reads the pages of all users."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.net import native
from bagua.net.library import MissingFileError
from bagua.net.stats.errors import StatsError
from bagua.net.stats.quantities import printable

MAGIC = b"BAGUANET"
NIC_SLOTS = 16

# Upper bounds of the classes of message sizes in bytes; the last class has none.
SIZE_CLASSES = (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)

_PREFIX = struct.Struct("=8sI5I")
_PREFIX_NAMES = ("version", "header_bytes", "comm_slots", "comm_bytes", "stream_slots", "stream_bytes")
_PROCESS = struct.Struct("=qqqiiiI64s64s")
_USE = struct.Struct("=QIIQQQQ256s")
_USE_OFFSET = 200
_COMM = struct.Struct("=6IQ56s128s")
_REQUESTS = struct.Struct("=64I")
_STREAM = struct.Struct("=4I")
_SAMPLE = struct.Struct("=5Q")
_NIC = struct.Struct("=4I3Q24s")

_COMM_STATES = {1: "open", 2: "failed"}
_DIRECTIONS = {0: "send", 1: "receive"}
_NIC_STATES = {0: None, 1: "up", 2: "removed", 3: "down", 4: "no carrier", 5: "no address"}
_STREAM_STATES = {1: "live", 2: "parked", 3: "ended", 4: "lost"}


Counts = dict[str, int]  # by name, as the table of net_plugin/stats/page_layout.h has them


def page_layout() -> native.PageLayout:
    """Of this version, from the compiled library.

    Raises:
        StatsError: it is not installed.
    """
    try:
        return native.page_layout()
    except MissingFileError as error:
        raise StatsError(str(error)) from error


def names_of(rows: Sequence[native.CounterRow]) -> list[str]:
    """Of each word; a counter of several has them numbered."""
    return [row.name if row.words == 1 else f"{row.name}_{word}" for row in rows for word in range(row.words)]


def messages_of(comm: Mapping[str, int]) -> int:
    return comm["inline_messages"] + comm["striped_messages"] + comm["received_messages"]


def sizes_of(comm: Mapping[str, int]) -> list[int]:
    return [comm[f"message_sizes_{number}"] for number in range(len(SIZE_CLASSES) + 1)]


@dataclass(frozen=True)
class StreamSlot:
    comm: int
    index: int
    nic: int | None  # its place in Page.nics; None: none, as within a host
    state: str
    counters: Counts
    sampled_ms: int  # monotonic clock; 0: never
    round_trip_us: int
    least_round_trip_us: int
    estimated_bytes_per_s: int
    bytes_over_other_nics: int  # of its bytes


@dataclass(frozen=True)
class NicSlot:
    name: str
    state: str | None  # up, removed, down, no carrier, no address; None: nothing watches it
    speed_mbps: int  # 0: unknown
    downs: int  # times that it became unusable
    streams_lost: int
    since_ms: int  # of the state; monotonic clock; 0: from the beginning
    closed_sent_bytes: int  # of streams that are closed or were replaced over another NIC
    closed_received_bytes: int


@dataclass(frozen=True)
class CommSlot:
    counters: Counts
    posted_ms: tuple[int, ...]  # of outstanding requests; monotonic clock modulo 2^32
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


@dataclass(frozen=True)
class Page:
    closed_comms: Counts
    closed_streams: Counts
    comms: tuple[CommSlot, ...]
    streams: tuple[StreamSlot, ...]
    nics: tuple[NicSlot | None, ...]  # by slot; None: it is free
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


def slots_in_use(header: bytes, where: str) -> tuple[int, int]:
    """How many slots of comms and streams are to be read, after a check of everything that their places depend on.

    Raises:
        StatsError: it is not a page, or one of another version.
    """
    at = page_layout().places
    if len(header) < at["header_bytes"] or not header.startswith(MAGIC):
        raise StatsError(
            f"{where} has no complete statistics page.\n"
            "It is starting, or something else made a file of that name.\nTry again."
        )
    _, *found = _PREFIX.unpack_from(header)
    expected = [at[name] for name in _PREFIX_NAMES]
    if found != expected:
        plugin = _text(_PROCESS.unpack_from(header, _PREFIX.size)[7])
        raise StatsError(
            f"{where} has a statistics page of version {found[0]}; this bagua-net reads version {at['version']}.\n"
            f"The process uses Bagua-Net {plugin or 'of an unknown version'}.\n"
            "Run the bagua-net of the environment in which the process was started."
        )
    _, comms, streams, *_ = _USE.unpack_from(header, _USE_OFFSET)
    return min(comms, at["comm_slots"]), min(streams, at["stream_slots"])


def generation_of(header: bytes) -> int:
    """Odd: a change is under way."""
    return int(_USE.unpack_from(header, _USE_OFFSET)[0])


def read_page(header: bytes, comms: bytes, streams: bytes) -> Page:
    """Of a header that `slots_in_use` has checked, and the slots that it named."""
    at = page_layout().places
    generation, _, _, *use = _values(_USE, header, _USE_OFFSET)
    read_comms = (_comm(comms, slot, at) for slot in range(len(comms) // at["comm_bytes"]))
    read_streams = (_stream(streams, slot, at) for slot in range(len(streams) // at["stream_bytes"]))
    return Page(
        _counts(page_layout().comm_counters, header, at["closed_comms"]),
        _counts(page_layout().stream_counters, header, at["closed_streams"]),
        tuple(comm for comm in read_comms if comm is not None),
        tuple(stream for stream in read_streams if stream is not None),
        tuple(_nic(header, at["nics"] + slot * _NIC.size) for slot in range(NIC_SLOTS)),
        *[*_values(_PROCESS, header, _PREFIX.size), generation, *use],
    )


def _comm(data: bytes, slot: int, at: Mapping[str, int]) -> CommSlot | None:
    begin = slot * at["comm_bytes"]
    state, direction, same_host, *others = _values(_COMM, data, begin)
    if state not in _COMM_STATES or direction not in _DIRECTIONS:
        return None
    return CommSlot(
        _counts(page_layout().comm_counters, data, begin + at["comm_counters"]),
        tuple(filter(None, _REQUESTS.unpack_from(data, begin + at["posted_ms"]))),
        slot,
        _COMM_STATES[state],
        _DIRECTIONS[direction],
        same_host != 0,
        *others,
    )


def _stream(data: bytes, slot: int, at: Mapping[str, int]) -> StreamSlot | None:
    begin = slot * at["stream_bytes"]
    state, comm, index, nic = _STREAM.unpack_from(data, begin)
    if state not in _STREAM_STATES:
        return None
    return StreamSlot(
        comm,
        index,
        nic - 1 if 0 < nic <= NIC_SLOTS else None,
        _STREAM_STATES[state],
        _counts(page_layout().stream_counters, data, begin + at["stream_counters"]),
        *_SAMPLE.unpack_from(data, begin + at["sample"]),
    )


def _nic(header: bytes, offset: int) -> NicSlot | None:
    state, *counts, name = _values(_NIC, header, offset)
    return None if not name or state not in _NIC_STATES else NicSlot(name, _NIC_STATES[state], *counts)


def _counts(rows: Sequence[native.CounterRow], data: bytes, offset: int) -> Counts:
    names = names_of(rows)
    return dict(zip(names, struct.unpack_from(f"={len(names)}Q", data, offset), strict=True))


def _values(form: struct.Struct, data: bytes, offset: int) -> list[Any]:
    return [_text(one) if isinstance(one, bytes) else one for one in form.unpack_from(data, offset)]


def _text(field: bytes) -> str:
    return printable(field.split(b"\0", 1)[0].decode(errors="replace"))
