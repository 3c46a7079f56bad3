"""From the samples of a --peers run to rows, tables and the closing block."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.net.bench.figures import figures, measurement_case, measurement_figures, result_of, speedup
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.peers.results import PeersResults
from bagua.net.bench.peers.session import RANKS, PeersSession
from bagua.net.bench.result_file import Figure, ResultFile
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import (
    LOUD,
    MISSING,
    RESET,
    Column,
    begins_block,
    format_bandwidth,
    format_cpu,
    format_verified,
    render_rows,
)
from bagua.net.bench.verdict import PairedRatio, paired_ratio


@dataclass(frozen=True, kw_only=True)
class PeersMeasurement(Measurement):
    """One backend with one number of comms at one message size. A time is a message's, algbw the rate each way.
    Figures of a process are those of its two ranks that has more."""

    comms: int  # each way, so a process has twice as many
    # Rate over the rate with the fewest comms of the run, within each repetition.
    rate_ratio: float
    rate_ratio_low: float
    rate_ratio_high: float
    threads: int
    descriptors: int
    tcp_sockets: int
    idle_resident_bytes: int  # what a process has grown by since before its first comm (mean of the two)
    idle_resident_bytes_per_comm: int | None  # what each comm beyond the fewest added to that
    idle_socket_bytes_per_comm: int
    idle_cpu_s: float  # of both processes, as long as they were watched
    idle_wakeups: int


def peers_rows(
    sessions: Sequence[PeersSession], message_sizes: Sequence[int], results: PeersResults
) -> list[PeersMeasurement]:
    return [
        _row(session, _fewest_comms(session.backend, sessions), size, results)
        for size in message_sizes
        for session in sessions
    ]


def _fewest_comms(backend: str, sessions: Sequence[PeersSession]) -> PeersSession:
    return min((one for one in sessions if one.backend == backend), key=lambda one: one.comms)


def _row(session: PeersSession, fewest: PeersSession, size: int, results: PeersResults) -> PeersMeasurement:
    samples = results.samples[session.name, size]
    base = Measurement.from_samples(
        backend=session.backend,
        collective="send_recv",
        size_bytes=size,
        ranks=RANKS,
        iterations=samples[0].messages,
        repetition_seconds=[sample.seconds / sample.messages for sample in samples],
        cpu_s_per_gb=statistics.median(sample.cpu_s_per_gb for sample in samples),
        verified=(session.name, size) not in results.wrong,
    )
    common: dict[str, Any] = vars(base)
    # The same messages in less time: the ratio of rates is the inverse ratio of times.
    ratio = paired_ratio(
        [sample.seconds for sample in results.samples[fewest.name, size]], [sample.seconds for sample in samples]
    )
    footprints = results.footprints[session.name]
    growth = session.resident_growth(footprints)
    per_comm = None
    if session.comms > fewest.comms:
        fixed = fewest.resident_growth(results.footprints[fewest.name])
        per_comm = round((growth - fixed) / (RANKS * (session.comms - fewest.comms)))
    idle = results.idle[session.name]
    return PeersMeasurement(
        **common,
        comms=session.comms,
        rate_ratio=ratio.median,
        rate_ratio_low=ratio.low,
        rate_ratio_high=ratio.high,
        threads=max(footprint.threads for footprint in footprints),
        descriptors=max(footprint.descriptors for footprint in footprints),
        tcp_sockets=max(footprint.tcp_sockets for footprint in footprints),
        idle_resident_bytes=round(growth),
        idle_resident_bytes_per_comm=per_comm,
        idle_socket_bytes_per_comm=round(
            max(footprint.socket_memory_bytes for footprint in footprints) / (RANKS * session.comms)
        ),
        idle_cpu_s=idle.cpu_s,
        idle_wakeups=sum(idle.wakeups.values()),
    )


def describe_backends(sessions: Sequence[PeersSession]) -> dict[str, str]:
    described = {}
    for session in sessions:
        said = session.listening[0]
        devices = ", ".join(said["devices"])
        described[session.backend] = (
            "plain sockets, one per comm, one non-blocking thread: what NCCL's own transport does by default"
            if session.backend == "bare"
            else f"{said['net_name']}, table {said['table']}, devices {devices or '?'}"
        )
    return described


def _slowest_to_fastest(row: PeersMeasurement) -> str:
    slowest, fastest = row.busbw_range_gb_s
    return f"{format_bandwidth(slowest)}..{format_bandwidth(fastest)}"


_COMMS: Column[PeersMeasurement] = Column("comms", "each way", lambda row: str(row.comms))
_BACKEND: Column[PeersMeasurement] = Column("backend", "", lambda row: row.backend, left=True)

TRAFFIC_COLUMNS: tuple[Column[PeersMeasurement], ...] = (
    Column("message", "", lambda row: format_size(row.bytes)),
    _COMMS,
    _BACKEND,
    Column("rate", "GB/s", lambda row: format_bandwidth(row.algbw_gb_s)),
    Column("min..max", "GB/s", _slowest_to_fastest),
    Column("of fewest", "x", lambda row: f"{row.rate_ratio:.2f}"),
    Column("spread", "x", lambda row: f"{row.rate_ratio_low:.2f}..{row.rate_ratio_high:.2f}"),
    Column("CPU", "s/GB", lambda row: MISSING if row.cpu_s_per_gb is None else format_cpu(row.cpu_s_per_gb)),
    Column("verified", "", lambda row: format_verified(row.verified)),
)

PROCESS_COLUMNS: tuple[Column[PeersMeasurement], ...] = (
    _COMMS,
    _BACKEND,
    Column("threads", "", lambda row: str(row.threads)),
    Column("descriptors", "", lambda row: str(row.descriptors)),
    Column("TCP sockets", "", lambda row: str(row.tcp_sockets)),
    Column("memory", "KiB", lambda row: f"{row.idle_resident_bytes / 1024:.0f}"),
    Column(
        "per comm",
        "KiB",
        lambda row: (
            MISSING if row.idle_resident_bytes_per_comm is None else f"{row.idle_resident_bytes_per_comm / 1024:.1f}"
        ),
        optional=True,
    ),
    Column("sockets' per comm", "KiB", lambda row: f"{row.idle_socket_bytes_per_comm / 1024:.1f}"),
    Column("idle CPU", "us", lambda row: f"{row.idle_cpu_s * 1e6:.0f}"),
    Column("wake-ups", "", lambda row: str(row.idle_wakeups)),
)


@dataclass(frozen=True)
class PeersReport:
    """A finished run."""

    title: str
    machine: MachineFacts
    backends: Mapping[str, str]
    rows: Sequence[PeersMeasurement]
    results: PeersResults
    idle_s: float
    parameters: Mapping[str, object]

    def head(self) -> str:
        width = max(len(name) for name in self.backends)
        lines = [self.title, self.machine.caption()]
        lines += [f"  {name.ljust(width)}  {text}" for name, text in self.backends.items()]
        return "\n".join(lines) + "\n"

    def tables(self, *, colour: bool = False) -> str:
        # What a process holds is the same at every message size.
        processes = [row for row in self.rows if row.bytes == self.rows[0].bytes]
        traffic, footprint = (
            render_rows(
                rows, columns, begins_block=begins_block, is_loud=lambda row: row.verified is False, colour=colour
            )
            for rows, columns in ((self.rows, TRAFFIC_COLUMNS), (processes, PROCESS_COLUMNS))
        )
        return f"{traffic}\na process after the traffic, and {self.idle_s:g} s of silence:\n{footprint}"

    def closing(self, *, colour: bool = False) -> str:
        lines = []
        for row, ratio in self.plugin_to_bare():
            plural = "" if row.comms == 1 else "s"
            lines.append(f"plugin vs bare with {row.comms} comm{plural} at {format_size(row.bytes)}: rate {ratio}")
        if not any(idle.wakeups for idle in self.results.idle.values()):
            lines.append(f"idle: no thread woke in {self.idle_s:g} s")
        if not self.results.wrong:
            lines.append("data: every byte of every verified message correct, before the traffic and after the silence")
        lines += [f"{LOUD}{text}{RESET}" if colour else text for text in self._faults()]
        return "\n".join(lines) + "\n"

    def plugin_to_bare(self) -> list[tuple[PeersMeasurement, PairedRatio]]:
        """Rates, taken within each repetition."""
        found = []
        for row in self.rows:
            mine = self.results.samples[f"plugin x{row.comms}", row.bytes] if row.backend == "plugin" else []
            theirs = self.results.samples.get((f"bare x{row.comms}", row.bytes), [])
            if mine and theirs:
                ratio = paired_ratio([one.seconds for one in theirs], [one.seconds for one in mine])
                found.append((row, ratio))
        return found

    def result(self) -> ResultFile:
        """For --json and --csv."""
        found = []
        for row in self.rows:
            case = measurement_case(row, ranks=RANKS, comms=row.comms)
            found += measurement_figures(row, case)
            ratio = row.rate_ratio, row.rate_ratio_low, row.rate_ratio_high
            found.append(Figure(case, "rate_ratio", "x", *ratio, row.repetitions))
            found += figures(
                case,
                {
                    ("threads", ""): [row.threads],
                    ("descriptors", ""): [row.descriptors],
                    ("tcp_sockets", ""): [row.tcp_sockets],
                    ("idle_memory", "B"): [row.idle_resident_bytes],
                    ("idle_memory_per_comm", "B"): [row.idle_resident_bytes_per_comm],
                    ("idle_socket_memory_per_comm", "B"): [row.idle_socket_bytes_per_comm],
                    ("idle_cpu", "s"): [row.idle_cpu_s],
                    ("idle_wakeups", ""): [row.idle_wakeups],
                },
            )
        for row, over_bare in self.plugin_to_bare():
            labels = measurement_case(row, ranks=RANKS, comms=row.comms)
            found.append(speedup(labels, "plugin", "bare", over_bare))
        return result_of(
            self.title,
            found,
            machine=self.machine,
            parameters={**self.parameters, "backends": dict(self.backends)},
            notes=self._faults(),
        )

    def _faults(self) -> list[str]:
        awake = [
            f"WOKE WHILE IDLE: {name}: {thread}: {count} times in {self.idle_s:g} s"
            for name, idle in self.results.idle.items()
            for thread, count in idle.wakeups.items()
        ]
        wrong = self.results.wrong.items()
        return [*awake, *(f"WRONG DATA: {name} at {format_size(size)}: {message}" for (name, size), message in wrong)]
