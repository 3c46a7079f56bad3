"""The rows of `bagua-net top` and how they are sorted. Knows nothing of the screen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bagua.net.stats.nics import host_line
from bagua.net.stats.peers import PeerTraffic, comms_of, traffic_by_peer
from bagua.net.stats.quantities import bytes_text, rate_text, seconds_text
from bagua.net.stats.reports import ProcessReport
from bagua.net.stats.sources import HostState


@dataclass(frozen=True)
class Row:
    source: str  # as the user named the host: two may say that they are called the same
    host: str
    process: ProcessReport
    traffic: PeerTraffic

    @property
    def key(self) -> str:
        traffic = self.traffic
        return "|".join((self.source, self.host, str(traffic.pid), traffic.peer, traffic.interface, traffic.direction))

    @property
    def stalled(self) -> float:
        stalls = self.traffic.stalls
        return max(self.waits_for_ranks, stalls.network or 0.0, stalls.worker or 0.0)

    @property
    def waits_for_ranks(self) -> float:
        """The share of the time that no network explains: one of the two ranks is late."""
        return max(self.traffic.stalls.peer_not_reading or 0.0, self.traffic.stalls.receive_not_posted or 0.0)


@dataclass(frozen=True)
class Column:
    title: str
    key: str  # that sorts by it
    text: Callable[[Row], str]
    order: Callable[[Row], tuple[float | str, ...]]
    left: bool = False


def _number(value: float | None) -> tuple[float, ...]:
    """The largest first, the unknown last."""
    return (0.0, -value) if value is not None else (1.0, 0.0)


_RANK = Column(
    "rank",
    "r",
    lambda row: "-" if row.process.rank is None else str(row.process.rank),
    lambda row: (row.process.rank is None, row.process.rank or 0, row.process.pid),
)

COLUMNS = (
    Column("host", "h", lambda row: row.host, lambda row: (row.host,), left=True),
    _RANK,
    Column("pid", "i", lambda row: str(row.process.pid), lambda row: (row.process.pid,)),
    Column("peer", "p", lambda row: row.traffic.peer, lambda row: (row.traffic.peer,), left=True),
    Column("device", "d", lambda row: row.traffic.interface, lambda row: (row.traffic.interface,), left=True),
    Column(
        "dir",
        "",
        lambda row: {"receive": "recv"}.get(row.traffic.direction, row.traffic.direction),
        lambda row: (row.traffic.direction,),
        left=True,
    ),
    Column("now", "n", lambda row: rate_text(row.traffic.bytes_per_s), lambda row: _number(row.traffic.bytes_per_s)),
    Column(
        "average",
        "a",
        lambda row: rate_text(row.traffic.average_bytes_per_s),
        lambda row: _number(row.traffic.average_bytes_per_s),
    ),
    Column(
        "message",
        "m",
        lambda row: bytes_text(row.traffic.mean_message_bytes),
        lambda row: _number(row.traffic.mean_message_bytes),
    ),
    Column("streams", "l", lambda row: row.traffic.streams_text(), lambda row: _number(row.traffic.streams_lost)),
    Column(
        "retransmits",
        "t",
        lambda row: str(row.traffic.retransmits) if row.traffic.direction == "send" else "-",
        lambda row: _number(row.traffic.retransmits),
    ),
    Column(
        "round trip",
        "u",
        lambda row: seconds_text(row.traffic.round_trip_s),
        lambda row: _number(row.traffic.round_trip_s),
    ),
    Column(
        "CPU",
        "c",
        lambda row: "-" if row.process.worker_cpu is None else f"{row.process.worker_cpu:.2f}",
        lambda row: _number(row.process.worker_cpu),
    ),
    Column(
        "oldest",
        "o",
        lambda row: seconds_text(row.traffic.oldest_request_s),
        lambda row: _number(row.traffic.oldest_request_s),
    ),
    Column("stalled", "s", lambda row: row.traffic.stall_text() or "-", lambda row: _number(row.stalled), left=True),
)


def rows_of(states: Iterable[HostState]) -> list[Row]:
    return [
        Row(state.name, state.report.host, process, traffic)
        for state in states
        if state.report is not None
        for process in state.report.processes
        for traffic in traffic_by_peer(process)
    ]


def sorted_rows(rows: Iterable[Row], column: Column, *, reverse: bool) -> list[Row]:
    return sorted(rows, key=lambda row: (column.order(row), _RANK.order(row), row.key), reverse=reverse)


def host_lines(states: Iterable[HostState], now_s: float, interval_s: float) -> list[str]:
    """Of each host: sums, or why there are none; and what its NICs carry, if it has several or one had troubles."""
    lines = []
    for state in states:
        report = state.report
        if report is None:
            lines.append(f"{state.name}: {(state.problem or 'waiting for the first report').splitlines()[0]}")
            continue
        processes = report.processes
        sent = sum(one.sent_bytes_per_s or 0.0 for one in processes)
        received = sum(one.received_bytes_per_s or 0.0 for one in processes)
        words = [f"{len(processes)} process{'es' if len(processes) != 1 else ''}"]
        words += [f"sending {rate_text(sent)}", f"receiving {rate_text(received)}"]
        failed = sum(one.comms_failed for one in processes)
        lost = sum(one.streams_lost for one in processes)
        words += [f"{failed} comms failed"] if failed else []
        words += [f"{lost} streams lost"] if lost else []
        words += (
            [f"processes of other users not shown ({report.denied} or more)"] if report.denied and not processes else []
        )
        words += [problem.splitlines()[0] for problem in report.problems]
        age_s = now_s - state.received_s
        if state.problem or age_s > 3 * interval_s + 2:
            words.append(f"no news for {seconds_text(age_s)}" + (f": {state.problem}" if state.problem else ""))
        lines.append(f"{report.host}: {', '.join(words)}")
        nics = host_line(one.nics for one in processes)
        lines += [f"{report.host}: {nics}"] if nics else []
    return lines


def details(row: Row) -> list[str]:
    """What a row has no columns for: sizes of messages, decisions, the last failure."""
    limits = ("256 B", "1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB")
    names = (*(f"to {one}" for one in limits), "larger")
    total = max(1, sum(row.traffic.message_sizes))
    sizes = ", ".join(
        f"{name} {100 * count / total:.0f} %"
        for name, count in zip(names, row.traffic.message_sizes, strict=True)
        if count
    )
    comms = comms_of(row.traffic, row.process)
    lines = [f"rank {_RANK.text(row)}, pid {row.process.pid}, {row.traffic.direction} {row.traffic.peer}"]
    lines.append(f"message sizes: {sizes or 'none yet'}")
    if row.traffic.direction == "send":
        awake, asleep = sum(one.handed_to_awake for one in comms), sum(one.handed_to_asleep for one in comms)
        kept, woken = sum(one.kept_from_asleep for one in comms), sum(one.wake_ups for one in comms)
        lines.append(
            f"handed to I/O threads: {awake} awake, {asleep} asleep; sent inline meanwhile {kept}; woken ahead {woken}"
        )
    trials, gains = max(one.growth_trials for one in comms), max(one.growth_gains for one in comms)
    deferred = sum(stream.deferred_chunks for one in comms for stream in one.streams)
    lines.append(f"chunks deferred to faster streams: {deferred}; trials of more streams: {trials}, successful {gains}")
    if row.process.last_failure:
        lines.append(f"last failure {seconds_text(row.process.last_failure_age_s)} ago: {row.process.last_failure}")
    return lines
