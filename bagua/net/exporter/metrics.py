"""The metrics of a host, in the terms of Prometheus but without its library.

Labels stay few: a process is its rank and pid, a peer is an address, and of one process at most MAX_PEERS have a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from bagua.net.stats.layout import SIZE_CLASSES, page_layout
from bagua.net.stats.peers import peer_names
from bagua.net.stats.reports import CommReport, HostReport, NicReport, ProcessReport

# Peers and devices of one process that get a name; further ones are one. An all-to-all over a thousand hosts would
# otherwise be some ten thousand series for every host.
MAX_PEERS = 64
MAX_DEVICES = 16
OTHER = "other"


@dataclass(frozen=True)
class PeerKey:
    rank: str
    pid: str
    peer: str  # an address
    device: str
    direction: str


@dataclass
class PeerCounts:
    bytes: float = 0
    messages: float = 0
    retransmits: float = 0
    peer_not_reading_s: float = 0
    network_s: float = 0
    worker_s: float = 0
    receive_not_posted_s: float = 0

    def add_growth(self, earlier: PeerCounts, later: PeerCounts) -> None:
        for name, value in vars(later).items():
            setattr(self, name, getattr(self, name) + max(0, value - getattr(earlier, name)))


@dataclass
class _Process:
    peers: set[str] = field(default_factory=set)  # that have a name
    devices: set[str] = field(default_factory=set)
    sums: dict[PeerKey, PeerCounts] = field(default_factory=dict)
    comms: dict[str, PeerCounts] = field(default_factory=dict)  # when they were seen last


class PeerSums:
    """Counts by peer that never fall. A comm takes its counts along when it is closed, and Prometheus would take the
    smaller sum for a restart and count all of it again. One per exporter. Not thread-safe."""

    def __init__(self) -> None:
        self._processes: dict[tuple[int, str], _Process] = {}

    def update(self, report: HostReport) -> None:
        present = {}
        for process in report.processes:
            key = (process.pid, process.started_id)
            present[key] = self._processes.get(key) or _Process()
            self._add(present[key], process)
        self._processes = present

    def items(self) -> Iterator[tuple[PeerKey, PeerCounts]]:
        for process in self._processes.values():
            yield from process.sums.items()

    def key_of(self, process: ProcessReport, comm: CommReport) -> PeerKey:
        """After `update` with the report that the two are of."""
        return _key(self._processes[process.pid, process.started_id], process, comm)

    def _add(self, known: _Process, process: ProcessReport) -> None:
        seen = {}
        for comm in process.comms:
            if len(known.peers) < MAX_PEERS:
                known.peers.add(peer_names(comm.peer)[1])
            if len(known.devices) < MAX_DEVICES:
                known.devices.add(comm.interface)
            counts = seen[comm.id] = _counts(comm)
            key = _key(known, process, comm)
            known.sums.setdefault(key, PeerCounts()).add_growth(known.comms.get(comm.id, PeerCounts()), counts)
        known.comms = seen


def rank_label(process: ProcessReport) -> str:
    return "" if process.rank is None else str(process.rank)


def _key(known: _Process, process: ProcessReport, comm: CommReport) -> PeerKey:
    address = peer_names(comm.peer)[1]
    peer = address if address in known.peers else OTHER
    device = comm.interface if comm.interface in known.devices else OTHER
    return PeerKey(rank_label(process), str(process.pid), peer, device, comm.direction)


def _counts(comm: CommReport) -> PeerCounts:
    streams = comm.streams
    return PeerCounts(
        bytes=comm.bytes,
        messages=comm.messages,
        retransmits=comm.retransmits,
        peer_not_reading_s=sum(one.peer_not_reading_s for one in streams),
        network_s=sum(max(0.0, one.busy_s - one.peer_not_reading_s) for one in streams),
        worker_s=sum(one.worker_wait_s for one in streams),
        receive_not_posted_s=sum(one.parked_s for one in streams),
    )


Labels = tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    labels: Labels
    value: float


@dataclass(frozen=True)
class Family:
    name: str  # of a counter without "_total", which the library adds
    kind: Literal["counter", "gauge"]
    help: str
    label_names: Labels
    samples: list[Sample] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        samples = [
            {"labels": dict(zip(self.label_names, one.labels, strict=True)), "value": one.value} for one in self.samples
        ]
        suffix = "_total" if self.kind == "counter" else ""
        return {"name": self.name + suffix, "type": self.kind, "help": self.help, "samples": samples}


@dataclass(frozen=True)
class SizeHistogram:
    """Messages by size of one process: counts up to and including each bound, the last without one."""

    labels: Labels
    buckets: list[tuple[str, float]]
    sum: float


_PROCESS = ("rank", "pid")
_NIC = ("rank", "pid", "nic")
_PEER = ("rank", "pid", "peer", "device", "direction")
SIZES_NAME = "bagua_net_message_size_bytes"
SIZES_HELP = "Sizes of the messages sent and received."


def families_of(report: HostReport, peers: PeerSums) -> list[Family]:
    """`peers` is updated with the report."""
    peers.update(report)
    return [
        *_of_host(report),
        *_of_counters(report),
        *_of_processes(report),
        *_of_nics(report),
        *_of_peers(report, peers),
    ]


def size_histograms(report: HostReport) -> list[SizeHistogram]:
    histograms = []
    for process in report.processes:
        count = 0
        buckets: list[tuple[str, float]] = []
        for bound, messages in zip([*map(str, SIZE_CLASSES), "+Inf"], process.message_sizes, strict=True):
            count += messages
            buckets.append((bound, float(count)))
        moved = process.sent_bytes + process.received_bytes
        histograms.append(SizeHistogram(_labels(process), buckets, float(moved)))
    return histograms


def _of_host(report: HostReport) -> list[Family]:
    def gauge(name: str, text: str, value: float) -> Family:
        return Family(f"bagua_net_{name}", "gauge", text, (), [Sample((), value)])

    info = Family(
        "bagua_net_process_info", "gauge", "1 for each process that uses Bagua-Net.", (*_PROCESS, "version", "workers")
    )
    for process in report.processes:
        info.samples.append(Sample((*_labels(process), process.plugin_version, str(process.workers)), 1.0))
    return [
        gauge("processes", "Processes of this host that use Bagua-Net.", len(report.processes)),
        gauge("processes_denied", "Processes that the exporter may not look at.", report.denied),
        gauge("processes_unreadable", "Processes whose statistics cannot be read.", len(report.problems)),
        info,
    ]


def _of_counters(report: HostReport) -> list[Family]:
    """As the table of counters names them; those of one name become one metric with a label."""
    families: dict[str, Family] = {}
    for row in (*page_layout().comm_counters, *page_layout().stream_counters):
        name, _, label = row.metric.partition(" ")
        if not name:
            continue
        key, _, value = label.partition("=")
        label_names = (*_PROCESS, key) if label else _PROCESS
        family = families.setdefault(name, Family(f"bagua_net_{name}", "counter", row.help, label_names))
        counts = ((process, getattr(process, row.name)) for process in report.processes)
        family.samples.extend(
            Sample((*_labels(process), value)[: len(label_names)], float(count)) for process, count in counts
        )
    return list(families.values())


def _of_processes(report: HostReport) -> list[Family]:
    def family(kind: Literal["counter", "gauge"], name: str, text: str, attribute: str, unknown: float = 0.0) -> Family:
        values = ((process, getattr(process, attribute)) for process in report.processes)
        samples = [Sample(_labels(one), unknown if value is None else float(value)) for one, value in values]
        return Family(f"bagua_net_{name}", kind, text, _PROCESS, samples)

    return [
        family("counter", "comms_failed", "Comms that failed: a peer or the network was lost.", "comms_failed"),
        family("counter", "comms_opened", "Comms opened.", "comms_opened"),
        family("counter", "io_thread_cpu_seconds", "CPU time of the I/O threads.", "worker_cpu_s"),
        family("gauge", "streams", "Data streams that are open.", "streams_live"),
        family("gauge", "requests_outstanding", "Requests that are not finished.", "outstanding"),
        family("gauge", "oldest_request_seconds", "Age of the oldest of them; 0: none.", "oldest_request_s"),
    ]


def _of_nics(report: HostReport) -> list[Family]:
    def family(
        kind: Literal["counter", "gauge"], name: str, text: str, value: Callable[[NicReport], float | None]
    ) -> Family:
        samples = [
            Sample((*_labels(process), nic.name), float(number))
            for process in report.processes
            for nic in process.nics
            if (number := value(nic)) is not None
        ]
        return Family(f"bagua_net_nic_{name}", kind, text, _NIC, samples)

    return [
        family("counter", "sent_bytes", "Bytes sent, by network interface, with headers.", lambda nic: nic.sent_bytes),
        family("counter", "received_bytes", "Bytes received, with headers.", lambda nic: nic.received_bytes),
        family("counter", "streams_lost", "Data streams lost, by network interface.", lambda nic: nic.streams_lost),
        family("counter", "downs", "Times that a network interface became unusable.", lambda nic: nic.downs),
        family(
            "gauge",
            "up",
            "1: the network interface can be used; 0: it cannot. Absent if nothing watches it.",
            lambda nic: None if nic.state is None else nic.state == "up",
        ),
        family("gauge", "streams", "Data streams that are open.", lambda nic: nic.streams_live),
    ]


def _of_peers(report: HostReport, peers: PeerSums) -> list[Family]:
    moved = Family("bagua_net_peer_bytes", "counter", "Bytes of messages, by peer.", _PEER)
    messages = Family("bagua_net_peer_messages", "counter", "Messages, by peer.", _PEER)
    retransmits = Family("bagua_net_peer_retransmitted_segments", "counter", "TCP segments sent again.", _PEER)
    stalled = Family(
        "bagua_net_peer_stalled_seconds",
        "counter",
        "Time that data waited, summed over data streams, by cause.",
        (*_PEER, "cause"),
    )
    for key, counts in peers.items():
        labels = _peer_labels(key)
        moved.samples.append(Sample(labels, counts.bytes))
        messages.samples.append(Sample(labels, counts.messages))
        if key.direction == "send":
            retransmits.samples.append(Sample(labels, counts.retransmits))
            stalled.samples.append(Sample((*labels, "peer_not_reading"), counts.peer_not_reading_s))
            stalled.samples.append(Sample((*labels, "network"), counts.network_s))
            stalled.samples.append(Sample((*labels, "worker"), counts.worker_s))
        else:
            stalled.samples.append(Sample((*labels, "receive_not_posted"), counts.receive_not_posted_s))
    return [moved, messages, retransmits, stalled, *_peer_gauges(report, peers)]


def _peer_gauges(report: HostReport, peers: PeerSums) -> list[Family]:
    streams: dict[PeerKey, float] = {}
    oldest: dict[PeerKey, float] = {}
    round_trips: dict[PeerKey, float] = {}
    for process in report.processes:
        for comm in process.comms:
            key = peers.key_of(process, comm)
            streams[key] = streams.get(key, 0.0) + comm.streams_live
            oldest[key] = max(oldest.get(key, 0.0), comm.oldest_request_s or 0.0)
            if comm.round_trip_s is not None:
                round_trips[key] = max(round_trips.get(key, 0.0), comm.round_trip_s)
    named = [
        ("peer_streams", "Data streams that are open, by peer.", streams),
        ("peer_oldest_request_seconds", "Age of the oldest request that is not finished; 0: none.", oldest),
        ("peer_round_trip_seconds", "Round trip of the slowest data stream.", round_trips),
    ]
    return [
        Family(
            f"bagua_net_{name}", "gauge", text, _PEER, [Sample(_peer_labels(key), one) for key, one in values.items()]
        )
        for name, text, values in named
    ]


def _labels(process: ProcessReport) -> Labels:
    return rank_label(process), str(process.pid)


def _peer_labels(key: PeerKey) -> Labels:
    return key.rank, key.pid, key.peer, key.device, key.direction
