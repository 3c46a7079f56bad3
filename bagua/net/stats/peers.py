"""The comms of a process by peer, device and direction. NCCL opens many between the same two ranks; what people look
for is one line each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagua.net.stats.quantities import share_text
from bagua.net.stats.reports import CommReport, ProcessReport, Stalls

# Less of the time is not worth a word.
_NOTABLE_SHARE = 0.01
_STALL_WORDS = {
    "peer_not_reading": "peer not reading",
    "network": "network",
    "worker": "I/O thread",
    "receive_not_posted": "receive not posted",
}

# As the plugin writes it: "10.0.0.2:4711 (host node2, process 4242)"; the host only where the handshake told it.
_PEER = re.compile(r"(?P<address>.+):\d+ \((?:host (?P<host>[^,()]+), )?process (?P<process>\d+)\)")


@dataclass(frozen=True)
class PeerTraffic:
    """What one process exchanges with one peer over one device in one direction."""

    rank: int | None
    pid: int
    peer: str  # "node2 (4242)"
    address: str  # without port
    interface: str
    direction: str
    comms: int
    failed_comms: int
    bytes_per_s: float | None
    average_bytes_per_s: float
    bytes: int
    messages: int
    message_sizes: list[int]
    mean_message_bytes: float | None
    streams_live: int
    streams_joined: int
    streams_lost: int
    retransmits: int
    round_trip_s: float | None
    outstanding: int
    oldest_request_s: float | None
    stalls: Stalls

    def stall_text(self) -> str:
        """The causes, the largest first: "peer not reading 83 %"; "" if there is none."""
        named = [(getattr(self.stalls, name) or 0.0, word) for name, word in _STALL_WORDS.items()]
        notable = sorted((one for one in named if one[0] >= _NOTABLE_SHARE), reverse=True)
        return ", ".join(f"{word} {share_text(share)}" for share, word in notable)

    def streams_text(self) -> str:
        return str(self.streams_live) + (f" (-{self.streams_lost})" if self.streams_lost else "")


def peer_names(peer: str) -> tuple[str, str]:
    """What is shown of a peer, and its address without the port."""
    found = _PEER.fullmatch(peer)
    if found is None:
        return peer or "?", peer.rpartition(":")[0] or peer or "?"
    return f"{found['host'] or found['address']} ({found['process']})", found["address"]


def peer_process(peer: str) -> tuple[str, str | None, int]:
    """The peer's address, its host if its handshake told it (only those that connect do), and its process id as it sees
    that itself; -1: unknown."""
    found = _PEER.fullmatch(peer)
    return (peer, None, -1) if found is None else (found["address"], found["host"], int(found["process"]))


def comms_of(traffic: PeerTraffic, process: ProcessReport) -> list[CommReport]:
    """The comms that `traffic` sums up, of the report that it was made from."""
    return [comm for comm in process.comms if _key(comm) == (traffic.peer, traffic.interface, traffic.direction)]


def _key(comm: CommReport) -> tuple[str, str, str]:
    return peer_names(comm.peer)[0], comm.interface, comm.direction


def traffic_by_peer(process: ProcessReport) -> list[PeerTraffic]:
    """In the order in which the comms were opened."""
    groups: dict[tuple[str, str, str], list[CommReport]] = {}
    for comm in process.comms:
        groups.setdefault(_key(comm), []).append(comm)
    return [_traffic(process, *key, comms) for key, comms in groups.items()]


def _traffic(
    process: ProcessReport, peer: str, interface: str, direction: str, comms: Sequence[CommReport]
) -> PeerTraffic:
    moved = sum(comm.bytes for comm in comms)
    messages = sum(comm.messages for comm in comms)
    return PeerTraffic(
        rank=process.rank,
        pid=process.pid,
        peer=peer,
        address=peer_names(comms[0].peer)[1],
        interface=interface,
        direction=direction,
        comms=len(comms),
        failed_comms=sum(comm.state == "failed" for comm in comms),
        bytes_per_s=_sum(comm.bytes_per_s for comm in comms),
        average_bytes_per_s=sum(comm.average_bytes_per_s for comm in comms),
        bytes=moved,
        messages=messages,
        message_sizes=[sum(counts) for counts in zip(*(comm.message_sizes for comm in comms), strict=True)],
        mean_message_bytes=moved / messages if messages else None,
        streams_live=sum(comm.streams_live for comm in comms),
        streams_joined=sum(comm.streams_joined for comm in comms),
        streams_lost=sum(comm.streams_lost for comm in comms),
        retransmits=sum(comm.retransmits for comm in comms),
        round_trip_s=_largest(comm.round_trip_s for comm in comms),
        outstanding=sum(comm.outstanding for comm in comms),
        oldest_request_s=_largest(comm.oldest_request_s for comm in comms),
        stalls=Stalls(*(_largest(getattr(comm.stalls, name) for comm in comms) for name in _STALL_WORDS)),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
