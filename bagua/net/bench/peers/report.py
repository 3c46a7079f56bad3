"""From the samples of a --peers run to rows, tables and the closing block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua.net.bench.figures import figures, measurement_case, measurement_figures, result_of, speedup
from bagua.net.bench.machine import MachineFacts
from bagua.net.bench.measurement import Measurement
from bagua.net.bench.paced_run import PacedRun
from bagua.net.bench.peers.session import RANKS, Footprint, IdleCost, PeersSession
from bagua.net.bench.result_file import Figure, ResultFile
from bagua.net.bench.sample import Case
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import (
    LOUD,
    MISSING,
    RESET,
    Column,
    format_bandwidth,
    format_cpu,
    format_verified,
    render_rows,
)
from bagua.net.bench.verdict import PairedRatio, paired_ratio


@dataclass(frozen=True)
class PeersRow:
    """One backend with one number of comms at one message size. A time is a message's, algbw the rate each way.

    Attributes:
        comms: each way, so a process has twice as many.
        over_fewest: rate over the rate with the fewest comms of the run.
        over_bare: of the plugin's rate; None for other backends and without bare.
        process: by metric: of the rank that has more, after the traffic; memory is what a process (the mean of both)
            has grown by since before its first comm, and what each comm beyond the fewest added to that.
    """

    measured: Measurement
    comms: int
    over_fewest: PairedRatio
    over_bare: PairedRatio | None
    process: Mapping[str, float]


def peers_rows(
    sessions: Sequence[PeersSession],
    run: PacedRun,
    footprints: Mapping[str, list[Footprint]],
    idle: Mapping[str, IdleCost],
) -> list[PeersRow]:
    """By message size, in the order of the sessions."""
    rows = []
    for case in run.turn_plans:
        for session in sessions:
            if not (samples := run.turns.of(case, session.name)):
                continue
            fewest = min((one for one in sessions if one.backend == session.backend), key=lambda one: one.comms)
            over_fewest = _rate_over(run, case, session.name, fewest.name)
            assert over_fewest is not None
            verified = run.verified.get((case, session.name))
            rows.append(
                PeersRow(
                    Measurement.from_samples(
                        session.backend, case.collective, case.bytes, RANKS, samples, verified=verified
                    ),
                    session.comms,
                    over_fewest,
                    _rate_over(run, case, session.name, f"bare x{session.comms}")
                    if session.backend == "plugin"
                    else None,
                    _process(session, fewest, footprints, idle[session.name]),
                )
            )
    return rows


def _rate_over(run: PacedRun, case: Case, session: str, other: str) -> PairedRatio | None:
    pairs = run.turns.pairs(case, other, session)
    # The same messages in less time: the ratio of rates is the inverse ratio of times.
    return paired_ratio([a.seconds for a, _ in pairs], [b.seconds for _, b in pairs]) if pairs else None


def _process(
    session: PeersSession, fewest: PeersSession, footprints: Mapping[str, list[Footprint]], idle: IdleCost
) -> dict[str, float]:
    mine = footprints[session.name]
    growth = session.resident_growth(mine)
    found: dict[str, float] = {
        "threads": max(one.threads for one in mine),
        "descriptors": max(one.descriptors for one in mine),
        "tcp_sockets": max(one.tcp_sockets for one in mine),
        "idle_memory": round(growth),
        "idle_socket_memory_per_comm": round(max(one.socket_memory_bytes for one in mine) / (RANKS * session.comms)),
        "idle_cpu": idle.cpu_s,  # of both processes, as long as they were watched
        "idle_wakeups": sum(idle.wakeups.values()),
    }
    if session.comms > fewest.comms:
        added = growth - fewest.resident_growth(footprints[fewest.name])
        found["idle_memory_per_comm"] = round(added / (RANKS * (session.comms - fewest.comms)))
    return found


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


def _rates(row: PeersRow) -> str:
    slowest, fastest = row.measured.busbw_range_gb_s
    return f"{format_bandwidth(slowest)}..{format_bandwidth(fastest)}"


def _of_process(title: str, unit: str, metric: str, scale: float = 1.0, style: str = ".0f") -> Column[PeersRow]:
    return Column(
        title,
        unit,
        lambda row: f"{row.process[metric] * scale:{style}}" if metric in row.process else MISSING,
        optional=True,
    )


_COMMS: Column[PeersRow] = Column("comms", "each way", lambda row: str(row.comms))
_BACKEND: Column[PeersRow] = Column("backend", "", lambda row: row.measured.backend, left=True)

TRAFFIC_COLUMNS: tuple[Column[PeersRow], ...] = (
    Column("message", "", lambda row: format_size(row.measured.bytes)),
    _COMMS,
    _BACKEND,
    Column("rate", "GB/s", lambda row: format_bandwidth(row.measured.algbw_gb_s)),
    Column("min..max", "GB/s", _rates),
    Column("of fewest", "x", lambda row: f"{row.over_fewest.median:.2f}"),
    Column("spread", "x", lambda row: f"{row.over_fewest.low:.2f}..{row.over_fewest.high:.2f}"),
    Column("CPU", "s/GB", lambda row: format_cpu(row.measured.cpu_s_per_gb or 0.0)),
    Column("verified", "", lambda row: format_verified(row.measured.verified)),
)

PROCESS_COLUMNS: tuple[Column[PeersRow], ...] = (
    _COMMS,
    _BACKEND,
    _of_process("threads", "", "threads"),
    _of_process("descriptors", "", "descriptors"),
    _of_process("TCP sockets", "", "tcp_sockets"),
    _of_process("memory", "KiB", "idle_memory", 1 / 1024),
    _of_process("per comm", "KiB", "idle_memory_per_comm", 1 / 1024, ".1f"),
    _of_process("sockets' per comm", "KiB", "idle_socket_memory_per_comm", 1 / 1024, ".1f"),
    _of_process("idle CPU", "us", "idle_cpu", 1e6),
    _of_process("wake-ups", "", "idle_wakeups"),
)
_UNITS = {"idle_memory": "B", "idle_memory_per_comm": "B", "idle_socket_memory_per_comm": "B", "idle_cpu": "s"}


@dataclass(frozen=True)
class PeersReport:
    """A finished run."""

    title: str
    machine: MachineFacts
    backends: Mapping[str, str]
    rows: Sequence[PeersRow]
    run: PacedRun
    idle: Mapping[str, IdleCost]
    idle_s: float
    parameters: Mapping[str, object]

    def head(self) -> str:
        width = max(len(name) for name in self.backends)
        lines = [self.title, self.machine.caption()]
        lines += [f"  {name.ljust(width)}  {text}" for name, text in self.backends.items()]
        return "\n".join(lines) + "\n"

    def tables(self, *, colour: bool = False) -> str:
        # What a process holds is the same at every message size.
        processes = [row for row in self.rows if row.measured.bytes == self.rows[0].measured.bytes]
        traffic, footprint = (
            render_rows(
                rows,
                columns,
                begins_block=lambda before, row: before.measured.bytes != row.measured.bytes,
                is_loud=lambda row: row.measured.verified is False,
                colour=colour,
            )
            for rows, columns in ((self.rows, TRAFFIC_COLUMNS), (processes, PROCESS_COLUMNS))
        )
        return f"{traffic}\na process after the traffic, and {self.idle_s:g} s of silence:\n{footprint}"

    def closing(self, *, colour: bool = False) -> str:
        lines = []
        for row in self.rows:
            if row.over_bare is not None:
                comms = f"{row.comms} comm{'' if row.comms == 1 else 's'} at {format_size(row.measured.bytes)}"
                lines.append(f"plugin vs bare with {comms}: rate {row.over_bare}")
        lines += self.run.turns.notes
        if not any(idle.wakeups for idle in self.idle.values()):
            lines.append(f"idle: no thread woke in {self.idle_s:g} s")
        if not self.run.wrong:
            lines.append("data: every byte of every verified message correct, before the traffic and after the silence")
        lines += [f"{LOUD}{text}{RESET}" if colour else text for text in self._faults()]
        return "\n".join(lines) + "\n"

    def result(self) -> ResultFile:
        """For --json and --csv."""
        found = []
        for row in self.rows:
            case = measurement_case(row.measured, ranks=RANKS, comms=row.comms)
            ratio = row.over_fewest
            found += measurement_figures(row.measured, case)
            found.append(Figure(case, "rate_ratio", "x", ratio.median, ratio.low, ratio.high, ratio.repetitions))
            found += figures(case, {(metric, _UNITS.get(metric, "")): [value] for metric, value in row.process.items()})
            if row.over_bare is not None:
                found.append(speedup(case, "plugin", "bare", row.over_bare))
        return result_of(
            self.title,
            found,
            machine=self.machine,
            parameters={**self.parameters, "backends": dict(self.backends)},
            notes=[*self.run.turns.notes, *self._faults()],
        )

    def _faults(self) -> list[str]:
        awake = [
            f"WOKE WHILE IDLE: {name}: {thread}: {count} times in {self.idle_s:g} s"
            for name, idle in self.idle.items()
            for thread, count in idle.wakeups.items()
        ]
        return [*awake, *self.run.faults()]
