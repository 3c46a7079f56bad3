"""`bagua-net stats` as text: one block per process, one row per peer, device and direction."""

from __future__ import annotations

from collections.abc import Sequence

from bagua.cli.terminal import Column, Terminal, table
from bagua.net.stats.nics import is_worth_showing, state_text
from bagua.net.stats.peers import PeerTraffic, peer_names, traffic_by_peer
from bagua.net.stats.quantities import bytes_text, rate_text, seconds_text, share_text
from bagua.net.stats.reports import CommReport, HostReport, NicReport, ProcessReport

_INDENT = "  "


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
    text, hidden = table(_peer_columns(rows), terminal, width, _INDENT)
    lines.append(text)
    if is_worth_showing(process.nics):
        nic_text, more = table(_nic_columns(process.nics), terminal, width, _INDENT)
        lines += ["", nic_text]
        hidden = max(hidden, more)
    if streams:
        stream_text, more = table(_stream_columns(process.comms), terminal, width, _INDENT)
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
    found += [state_text(nic) for nic in process.nics if nic.is_unusable]
    if process.comms_hidden:
        found.append(f"{process.comms_hidden} open comms are not shown: the statistics page is full")
    return found


def _peer_columns(rows: Sequence[PeerTraffic]) -> list[Column]:
    return [
        Column("peer", [row.peer for row in rows], 0, left=True),
        Column("device", [row.interface for row in rows], 4, left=True),
        Column("dir", [{"receive": "recv"}.get(row.direction, row.direction) for row in rows], 0, left=True),
        Column("now", [rate_text(row.bytes_per_s) for row in rows], 0),
        Column("average", [rate_text(row.average_bytes_per_s) for row in rows], 5),
        Column("message", [bytes_text(row.mean_message_bytes) for row in rows], 6),
        Column("streams", [row.streams_text() for row in rows], 2),
        Column("retransmits", [str(row.retransmits) if row.direction == "send" else "-" for row in rows], 3),
        Column("round trip", [seconds_text(row.round_trip_s) for row in rows], 7),
        Column("outstanding", [str(row.outstanding) for row in rows], 8),
        Column("stalled", [row.stall_text() or "-" for row in rows], 1, left=True),
    ]


def _nic_columns(nics: Sequence[NicReport]) -> list[Column]:
    return [
        Column("NIC", [nic.name for nic in nics], 0, left=True),
        Column("state", [nic.state or "-" for nic in nics], 0, left=True),
        Column("sending", [rate_text(nic.sent_bytes_per_s) for nic in nics], 0),
        Column("receiving", [rate_text(nic.received_bytes_per_s) for nic in nics], 0),
        Column("share", [share_text(nic.share) for nic in nics], 1),
        Column("speed", [rate_text(nic.speed_mbps and nic.speed_mbps * 125_000) for nic in nics], 6),
        Column("streams", [str(nic.streams_live) for nic in nics], 2),
        Column("lost", [str(nic.streams_lost) for nic in nics], 3),
        Column("times down", [str(nic.downs) for nic in nics], 4),
        Column("retransmits", [str(nic.retransmits) for nic in nics], 5),
    ]


def _stream_columns(comms: Sequence[CommReport]) -> list[Column]:
    pairs = [(comm, stream) for comm in comms for stream in comm.streams]
    return [
        Column("comm", [comm.id.partition(".")[0] for comm, _ in pairs], 0),
        Column("peer", [peer_names(comm.peer)[0] for comm, _ in pairs], 5, left=True),
        Column("dir", [{"receive": "recv"}.get(comm.direction, comm.direction) for comm, _ in pairs], 1, left=True),
        Column("stream", [str(stream.index) for _, stream in pairs], 0),
        Column("NIC", [stream.nic or "-" for _, stream in pairs], 2, left=True),
        Column("state", [stream.state for _, stream in pairs], 1, left=True),
        Column("now", [rate_text(stream.bytes_per_s) for _, stream in pairs], 0),
        Column("bytes", [bytes_text(stream.bytes) for _, stream in pairs], 4),
        Column("estimate", [rate_text(stream.estimated_bytes_per_s) for _, stream in pairs], 6),
        Column("deferred", [str(stream.deferred_chunks) for _, stream in pairs], 7),
        Column("retransmits", [str(stream.retransmits) for _, stream in pairs], 3),
        Column("round trip", [seconds_text(stream.round_trip_s) for _, stream in pairs], 5),
    ]


def _fold(text: str, width: int | None, indent: str = "") -> str:
    if width is None:
        return "\n".join(indent + line for line in text.splitlines())
    return "\n".join(Terminal(width, False).wrapped(line, indent) for line in text.splitlines())
