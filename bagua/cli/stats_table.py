"""`bagua-net stats` as text: one block per process, one row per peer, device and direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.cli.terminal import Terminal
from bagua.net.stats.peers import PeerTraffic, peer_names, traffic_by_peer
from bagua.net.stats.quantities import bytes_text, rate_text, seconds_text
from bagua.net.stats.reports import CommReport, HostReport, ProcessReport

_INDENT = "  "
_GAP = "  "


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[str]
    rank: int  # the columns of the highest rank go first where a terminal is narrow
    left: bool = False


def rendered(report: HostReport, terminal: Terminal, width: int | None, *, streams: bool) -> str:
    """
    Args:
        terminal: whether to colour.
        width: of the terminal in columns; columns of the table that do not fit are left out, and a line says so.
            None: as wide as it gets.
        streams: show each data stream as well.
    """
    count = len(report.processes)
    over = "" if report.interval_s is None else f", rates over {seconds_text(report.interval_s)}"
    blocks = [terminal.bold(f"{count} process{'es' if count != 1 else ''} on {report.host}{over}")]
    hidden = 0
    for process in report.processes:
        block, left_out = _process(process, terminal, width, streams)
        hidden = max(hidden, left_out)
        blocks.append(block)
    if hidden:
        blocks.append(terminal.dim(_fold(f"{hidden} columns do not fit; widen the terminal or use --json.", width)))
    blocks += [terminal.coloured(_fold(problem, width), "33") for problem in report.problems]
    return "\n\n".join(blocks)


def _process(process: ProcessReport, terminal: Terminal, width: int | None, streams: bool) -> tuple[str, int]:
    name = f"pid {process.pid}" if process.rank is None else f"rank {process.rank}, pid {process.pid}"
    cpu = "" if process.worker_cpu is None else f" using {process.worker_cpu:.2f} CPUs"
    paths = f"{bytes_text(process.inline_bytes)} inline, {bytes_text(process.striped_bytes)} striped"
    paths += f", of these {bytes_text(process.zero_copy_bytes)} zero-copy"
    age = "" if process.oldest_request_s is None else f", the oldest for {seconds_text(process.oldest_request_s)}"
    facts = [
        f"Bagua-Net {process.plugin_version}, up {seconds_text(process.age_s)}, {process.workers} I/O threads{cpu}",
        f"sent {bytes_text(process.sent_bytes)} in {process.sent_messages} messages: {paths}",
        f"received {bytes_text(process.received_bytes)} in {process.received_messages} messages",
        f"{process.outstanding} requests outstanding{age}",
    ]
    lines = [terminal.bold(name), *(_fold(fact, width, _INDENT) for fact in facts)]
    troubles = _troubles(process)
    lines += [terminal.coloured(_fold(trouble, width, _INDENT), "31") for trouble in troubles]
    rows = traffic_by_peer(process)
    if not rows:
        return "\n".join([*lines, f"{_INDENT}no connection is open"]), 0
    text, hidden = _table(_peer_columns(rows), width, terminal)
    lines.append(text)
    if streams:
        stream_text, more = _table(_stream_columns(process.comms), width, terminal)
        lines += ["", stream_text]
        hidden = max(hidden, more)
    return "\n".join(lines), hidden


def _troubles(process: ProcessReport) -> list[str]:
    found = []
    if process.comms_failed:
        age = seconds_text(process.last_failure_age_s)
        found.append(f"{process.comms_failed} comms failed, the last {age} ago: {process.last_failure}")
    if process.streams_lost:
        found.append(f"{process.streams_lost} data streams lost, {process.streams_joined} joined")
    if process.checksum_errors:
        found.append(f"{process.checksum_errors} chunks had a wrong checksum, {process.resent_chunks} were sent again")
    if process.comms_hidden:
        found.append(f"{process.comms_hidden} open comms are not shown: the statistics page is full")
    return found


def _peer_columns(rows: Sequence[PeerTraffic]) -> list[_Column]:
    return [
        _Column("peer", [row.peer for row in rows], 0, left=True),
        _Column("device", [row.interface for row in rows], 4, left=True),
        _Column("dir", [{"receive": "recv"}.get(row.direction, row.direction) for row in rows], 0, left=True),
        _Column("now", [rate_text(row.bytes_per_s) for row in rows], 0),
        _Column("average", [rate_text(row.average_bytes_per_s) for row in rows], 5),
        _Column("message", [bytes_text(row.mean_message_bytes) for row in rows], 6),
        _Column("streams", [row.streams_text() for row in rows], 2),
        _Column("retransmits", [str(row.retransmits) if row.direction == "send" else "-" for row in rows], 3),
        _Column("round trip", [seconds_text(row.round_trip_s) for row in rows], 7),
        _Column("outstanding", [str(row.outstanding) for row in rows], 8),
        _Column("stalled", [row.stall_text() or "-" for row in rows], 1, left=True),
    ]


def _stream_columns(comms: Sequence[CommReport]) -> list[_Column]:
    pairs = [(comm, stream) for comm in comms for stream in comm.streams]
    return [
        _Column("comm", [comm.id.partition(".")[0] for comm, _ in pairs], 0),
        _Column("peer", [peer_names(comm.peer)[0] for comm, _ in pairs], 5, left=True),
        _Column("dir", [{"receive": "recv"}.get(comm.direction, comm.direction) for comm, _ in pairs], 1, left=True),
        _Column("stream", [str(stream.index) for _, stream in pairs], 0),
        _Column("state", [stream.state for _, stream in pairs], 1, left=True),
        _Column("now", [rate_text(stream.bytes_per_s) for _, stream in pairs], 0),
        _Column("bytes", [bytes_text(stream.bytes) for _, stream in pairs], 4),
        _Column("estimate", [rate_text(stream.estimated_bytes_per_s) for _, stream in pairs], 6),
        _Column("deferred", [str(stream.deferred_chunks) for _, stream in pairs], 7),
        _Column("retransmits", [str(stream.retransmits) for _, stream in pairs], 3),
        _Column("round trip", [seconds_text(stream.round_trip_s) for _, stream in pairs], 5),
    ]


def _table(columns: list[_Column], width: int | None, terminal: Terminal) -> tuple[str, int]:
    """The text, and how many columns were left out of it."""

    def width_of(column: _Column) -> int:
        return max(len(column.title), *(len(cell) for cell in column.cells)) if column.cells else len(column.title)

    shown = list(columns)
    while width is not None and len(shown) > 1:
        needed = len(_INDENT) + sum(width_of(column) for column in shown) + len(_GAP) * (len(shown) - 1)
        last = max(shown, key=lambda column: column.rank)
        if needed <= width or last.rank == 0:
            break
        shown.remove(last)

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width_of(column)) if column.left else cell.rjust(width_of(column))
            for column, cell in zip(shown, cells, strict=True)
        )
        text = (_INDENT + _GAP.join(padded)).rstrip()
        return text if width is None else text[:width]

    lines = [terminal.dim(line([column.title for column in shown]))]
    lines += [line([column.cells[row] for column in shown]) for row in range(len(columns[0].cells))]
    return "\n".join(lines), len(columns) - len(shown)


def _fold(text: str, width: int | None, indent: str = "") -> str:
    if width is None:
        return "\n".join(indent + line for line in text.splitlines())
    return "\n".join(Terminal(width, False).wrapped(line, indent) for line in text.splitlines())
