"""A statistics page of the test's own process, with any content: what a plugin of another version, a hostile user or an
unlucky moment would leave there. The plugin's real pages are read in the tests that start load drivers."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bagua.net.native import CounterRow
from bagua.net.stats import layout

PAGE_NAME = "bagua-net-stats"


@dataclass
class Stream:
    index: int = 0
    state: int = 1  # live
    counters: dict[str, int] = field(default_factory=dict)
    sample: tuple[int, int, int, int] = (0, 0, 0, 0)
    nic: int = 0  # 1 + its place among the page's NICs; 0: none
    bytes_over_other_nics: int = 0


@dataclass
class Comm:
    peer: str = "10.0.0.2:4711 (host node2, process 4242)"
    interface: str = "eth0"
    direction: int = 0  # send
    state: int = 1  # open
    opened_ms: int = 1000
    counters: dict[str, int] = field(default_factory=dict)
    posted_ms: Sequence[int] = ()
    streams: Sequence[Stream] = (Stream(),)


@dataclass
class Nic:
    name: str = "eth0"
    state: int = 1  # up
    since_ms: int = 0
    speed_mbps: int = 0
    downs: int = 0
    streams_lost: int = 0
    closed_sent_bytes: int = 0
    closed_received_bytes: int = 0


LAYOUT = layout.page_layout()
AT = LAYOUT.places


def put_counters(page: bytearray, offset: int, rows: list[CounterRow], values: dict[str, int]) -> None:
    names = layout.names_of(rows)
    assert set(values) <= set(names), values
    struct.pack_into(f"={len(names)}Q", page, offset, *(values.get(name, 0) for name in names))


def page_bytes(
    comms: Sequence[Comm] = (),
    *,
    pid: int | None = None,
    rank: int = -1,
    version: int = AT["version"],
    generation: int = 2,
    host: str = "node1",
    failed: int = 0,
    last_failure: str = "",
    closed: dict[str, int] | None = None,
    started_ms: int | None = None,
    nics: Sequence[Nic] = (),
) -> bytes:
    streams = [(number, stream) for number, comm in enumerate(comms) for stream in comm.streams]
    header = bytearray(AT["header_bytes"])
    struct.pack_into(
        "=8sI5I", header, 0, layout.MAGIC, version, AT["header_bytes"], AT["comm_slots"], AT["comm_bytes"],
        AT["stream_slots"], AT["stream_bytes"],
    )  # fmt: skip
    started = int(time.monotonic() * 1000) - 1000 if started_ms is None else started_ms
    struct.pack_into(
        "=qqqiiiI64s64s", header, 32, os.getpid() if pid is None else pid, 0, started, rank, -1, -1, 2, b"9.9",
        host.encode(),
    )  # fmt: skip
    struct.pack_into(
        "=QIIQQQQ256s", header, 200, generation, len(comms), len(streams), len(comms), 0, failed, started,
        last_failure.encode(),
    )  # fmt: skip
    put_counters(header, AT["closed_comms"], LAYOUT.comm_counters, closed or {})
    for number, nic in enumerate(nics):
        struct.pack_into(
            "=4I3Q24s", header, AT["nics"] + 64 * number, nic.state, nic.speed_mbps, nic.downs, nic.streams_lost,
            nic.since_ms, nic.closed_sent_bytes, nic.closed_received_bytes, nic.name.encode(),
        )  # fmt: skip
    comm_slots = bytearray(AT["comm_slots"] * AT["comm_bytes"])
    for number, comm in enumerate(comms):
        begin = number * AT["comm_bytes"]
        struct.pack_into(
            "=6IQ56s128s", comm_slots, begin, comm.state, comm.direction, 0, 0, 0, 0, comm.opened_ms,
            comm.interface.encode(), comm.peer.encode(),
        )  # fmt: skip
        put_counters(comm_slots, begin + AT["comm_counters"], LAYOUT.comm_counters, comm.counters)
        posted_ms = [one % (1 << 32) or 1 for one in comm.posted_ms]  # negative: before the machine was started
        struct.pack_into(f"={len(posted_ms)}I", comm_slots, begin + AT["posted_ms"], *posted_ms)
    stream_slots = bytearray(max(1, len(streams)) * AT["stream_bytes"])
    for number, (comm_number, stream) in enumerate(streams):
        begin = number * AT["stream_bytes"]
        struct.pack_into("=4I", stream_slots, begin, stream.state, comm_number, stream.index, stream.nic)
        put_counters(stream_slots, begin + AT["stream_counters"], LAYOUT.stream_counters, stream.counters)
        struct.pack_into("=5Q", stream_slots, begin + AT["sample"], *stream.sample, stream.bytes_over_other_nics)
    return bytes(header + comm_slots + stream_slots)


@contextmanager
def page_of_this_process(content: bytes) -> Iterator[int]:
    """The descriptor, to write other content to."""
    descriptor = os.memfd_create(PAGE_NAME)
    try:
        os.pwrite(descriptor, content, 0)
        yield descriptor
    finally:
        os.close(descriptor)
