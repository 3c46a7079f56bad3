"""Counts by peer that never fall. A comm takes its counts along when it is closed, and Prometheus would take the
smaller sum for a restart and count all of it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bagua.net.stats.peers import peer_names
from bagua.net.stats.reports import CommReport, HostReport, ProcessReport

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
    """One per exporter. Not thread-safe."""

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
