"""What one host's processes do: counts since they began, and rates. This is also the JSON of
`bagua-net stats --json`: every field is one key, named with its unit. Fields that nobody knows are null."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = 3


@dataclass(frozen=True)
class Stalls:
    """Shares of the time between the two snapshots, 0 to 1, averaged over the streams that had something to send or, of
    `receive_not_posted`, over all receiving streams. null: not measured (within a host TCP is asked once a second)."""

    peer_not_reading: float | None  # send: the peer's window was closed
    network: float | None  # send: data was under way or waited for the network
    worker: float | None  # send: a message waited for a sleeping I/O thread
    receive_not_posted: float | None  # receive: data waited for this rank's receive


@dataclass(frozen=True)
class StreamReport:
    index: int
    nic: str | None  # that it goes over; null: none, as within a host
    state: str  # live, parked, ended, lost
    bytes: int
    bytes_per_s: float | None
    chunks: int
    zero_copy_bytes: int
    retransmits: int
    round_trip_s: float | None
    least_round_trip_s: float | None
    estimated_bytes_per_s: int | None  # that it could deliver
    socket_full: int  # times
    deferred_chunks: int
    worker_waits: int
    worker_wait_s: float
    parked: int
    parked_s: float
    busy_s: float
    peer_not_reading_s: float
    checksum_errors: int
    resent_chunks: int


@dataclass(frozen=True)
class CommReport:
    id: str  # unique in its process
    state: str  # open, failed
    direction: str  # send, receive
    peer: str
    interface: str
    same_host: bool
    age_s: float
    messages: int
    bytes: int
    inline_messages: int
    inline_bytes: int
    striped_messages: int
    striped_bytes: int
    bytes_per_s: float | None
    average_bytes_per_s: float
    messages_per_s: float | None
    message_sizes: list[int]  # messages by size: up to 256 B, then by four up to 4 MiB, and larger
    outstanding: int  # requests
    oldest_request_s: float | None
    streams_live: int
    streams_joined: int
    streams_lost: int
    streams_target: int | None  # null: the number is fixed
    growth_trials: int
    growth_gains: int
    handed_to_awake: int
    handed_to_asleep: int
    kept_from_asleep: int
    wake_ups: int
    retransmits: int
    round_trip_s: float | None  # of its slowest stream
    stalls: Stalls
    streams: list[StreamReport]


@dataclass(frozen=True)
class NicReport:
    name: str
    state: str | None  # up, removed, down, no carrier, no address; null: nothing watches it (BAGUA_NET_RECOVERY=0)
    state_age_s: float | None  # null: from the beginning
    speed_mbps: int | None
    sent_bytes: int  # over connections to other hosts, with headers
    received_bytes: int
    sent_bytes_per_s: float | None
    received_bytes_per_s: float | None
    share: float | None  # of what all NICs of the process carried between the two snapshots, 0 to 1
    streams_live: int
    streams_lost: int
    downs: int  # times that it became unusable
    retransmits: int  # of its open streams

    @property
    def is_unusable(self) -> bool:
        return self.state not in (None, "up")


@dataclass(frozen=True)
class ProcessReport:
    pid: int
    own_pid: int  # as the process itself sees it, and its peers: in a container it is another one
    state: str  # of the process, as `ps` has it: "T" is stopped
    started_id: str  # differs from that of an earlier process with this pid
    host: str
    rank: int | None
    local_rank: int | None
    world_size: int | None
    plugin_version: str
    age_s: float
    workers: int
    worker_cpu: float | None  # CPUs that the I/O threads used
    worker_cpu_s: float  # of the threads that run now
    sent_bytes: int  # closed comms included, as in all sums of a process
    sent_messages: int
    received_bytes: int
    received_messages: int
    inline_bytes: int
    striped_bytes: int
    zero_copy_bytes: int
    inline_messages: int
    striped_messages: int
    message_sizes: list[int]
    handed_to_awake: int
    handed_to_asleep: int
    kept_from_asleep: int
    wake_ups: int
    deferred_chunks: int
    sent_bytes_per_s: float | None
    received_bytes_per_s: float | None
    outstanding: int
    oldest_request_s: float | None
    retransmits: int
    streams_live: int
    streams_joined: int
    streams_lost: int
    checksum_errors: int
    resent_chunks: int
    comms_opened: int
    comms_hidden: int  # open, and not shown because the page is full
    comms_failed: int
    last_failure: str | None
    last_failure_age_s: float | None
    nics: list[NicReport]
    comms: list[CommReport]


@dataclass(frozen=True)
class HostReport:
    schema: int
    host: str
    unix_s: float
    interval_s: float | None
    denied: int  # processes of other users, which may use Bagua-Net or not
    problems: list[str]
    processes: list[ProcessReport]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
