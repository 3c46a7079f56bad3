"""Makes a report of two snapshots: the counts of the later one, and what they rose by since the earlier one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from bagua.net.stats.layout import CommSlot, Counts, NicSlot, StreamSlot, messages_of, sizes_of
from bagua.net.stats.nics import nic_reports
from bagua.net.stats.reports import SCHEMA, CommReport, HostReport, ProcessReport, Stalls, StreamReport
from bagua.net.stats.snapshots import ProcessSnapshot, Snapshot

_UINT32 = 1 << 32
_PER_SECOND = {"_us": 1e6, "_ns": 1e9}


def report(earlier: Snapshot | None, later: Snapshot) -> HostReport:
    """Counts of `later`, and rates since `earlier`; without that the rates are None."""
    before = {} if earlier is None else {(one.pid, one.page.started_ms): one for one in earlier.processes}
    return HostReport(
        schema=SCHEMA,
        host=later.host,
        unix_s=later.unix_s,
        interval_s=None if earlier is None else later.unix_s - earlier.unix_s,
        denied=later.denied,
        problems=list(later.problems),
        processes=[_process(before.get((one.pid, one.page.started_ms)), one) for one in later.processes],
    )


def oldest_request_s(comm: CommSlot, now_ms: int) -> float | None:
    """
    Args:
        now_ms: of the monotonic clock.
    """
    ages_ms = [(now_ms - posted) % _UINT32 for posted in comm.posted_ms]
    # The clock that stamps requests is coarse: one posted just now may seem to come from the future.
    return _largest(age / 1000 if age < _UINT32 // 2 else 0.0 for age in ages_ms)


def _process(earlier: ProcessSnapshot | None, later: ProcessSnapshot) -> ProcessReport:
    page = later.page
    elapsed_s = None if earlier is None else later.taken_s - earlier.taken_s
    streams = _streams_by_comm(later)
    streams_before = {} if earlier is None else _streams_by_comm(earlier)
    before = {} if earlier is None else {_key(comm): comm for comm in earlier.page.comms}
    comms = [
        _comm(
            before.get(_key(comm)),
            comm,
            streams_before.get(comm.slot, []) if _key(comm) in before else [],
            streams.get(comm.slot, []),
            page.nics,
            elapsed_s,
            int(1000 * later.taken_s),
        )
        for comm in page.comms
    ]
    sums = _sums(later)
    sums_before = sums if earlier is None else _sums(earlier)
    now_s = later.taken_s
    return ProcessReport(
        pid=later.pid,
        own_pid=later.kernel.own_pid,
        state=later.kernel.state,
        started_id=str(page.started_ms),
        host=page.host,
        rank=_or_none(page.rank),
        local_rank=_or_none(page.local_rank),
        world_size=_or_none(page.world_size),
        plugin_version=page.plugin_version,
        age_s=max(0.0, now_s - page.started_ms / 1000),
        workers=page.workers,
        worker_cpu=None if earlier is None else _rate(_cpu(later) - _cpu(earlier), elapsed_s),
        worker_cpu_s=_cpu(later),
        sent_bytes=_sent_bytes(sums),
        sent_messages=sums["inline_messages"] + sums["striped_messages"],
        message_sizes=sizes_of(sums),
        sent_bytes_per_s=_rate(_sent_bytes(sums) - _sent_bytes(sums_before), elapsed_s),
        received_bytes_per_s=_rate(sums["received_bytes"] - sums_before["received_bytes"], elapsed_s),
        outstanding=sum(comm.outstanding for comm in comms),
        oldest_request_s=_largest(comm.oldest_request_s for comm in comms),
        streams_live=sum(comm.streams_live for comm in comms),
        comms_opened=page.comms_opened,
        comms_hidden=page.comms_hidden,
        comms_failed=page.comms_failed,
        last_failure=page.last_failure or None,
        last_failure_age_s=max(0.0, now_s - page.last_failure_ms / 1000) if page.comms_failed else None,
        nics=nic_reports(None if earlier is None else earlier.page, page, elapsed_s, int(1000 * now_s)),
        comms=comms,
        **_shown(ProcessReport, sums),
    )


def _comm(
    earlier: CommSlot | None,
    later: CommSlot,
    streams_before: Sequence[StreamSlot],
    streams: Sequence[StreamSlot],
    nics: Sequence[NicSlot | None],
    elapsed_s: float | None,
    now_ms: int,
) -> CommReport:
    counters = later.counters
    age_s = max(0.001, now_ms / 1000 - later.opened_ms / 1000)
    moved = _bytes(counters)
    messages = messages_of(counters)
    known_s = elapsed_s if earlier is not None else None
    rate = None if earlier is None else _rate(moved - _bytes(earlier.counters), known_s)
    before = None if earlier is None else earlier.counters
    past_messages = 0 if before is None else messages_of(before)
    by_index = {one.index: one for one in streams_before}
    return CommReport(
        id=f"{later.slot}.{later.opened_ms}",
        state=later.state,
        direction=later.direction,
        peer=later.peer,
        interface=later.interface,
        same_host=later.same_host,
        age_s=age_s,
        messages=messages,
        bytes=moved,
        bytes_per_s=rate,
        average_bytes_per_s=moved / age_s,
        messages_per_s=_rate(messages - past_messages, known_s),
        message_sizes=sizes_of(counters),
        outstanding=len(later.posted_ms),
        oldest_request_s=oldest_request_s(later, now_ms),
        streams_live=sum(one.state in ("live", "parked") for one in streams),
        streams_target=later.streams_target or None,
        growth_trials=later.growth_trials,
        growth_gains=later.growth_gains,
        retransmits=sum(one.counters["retransmits"] for one in streams),
        round_trip_s=_largest(one.round_trip_us / 1e6 for one in streams if one.sampled_ms),
        stalls=_stalls(later.direction, by_index, streams, known_s),
        streams=[
            _stream(by_index.get(one.index), one, None if one.nic is None else nics[one.nic], known_s)
            for one in sorted(streams, key=lambda one: one.index)
        ],
        **_shown(CommReport, counters),
    )


def _stream(
    earlier: StreamSlot | None, later: StreamSlot, nic: NicSlot | None, elapsed_s: float | None
) -> StreamReport:
    counters = later.counters
    sampled = later.sampled_ms > 0
    return StreamReport(
        index=later.index,
        nic=None if nic is None else nic.name,
        state=later.state,
        bytes_per_s=None if earlier is None else _rate(counters["bytes"] - earlier.counters["bytes"], elapsed_s),
        round_trip_s=later.round_trip_us / 1e6 if sampled else None,
        least_round_trip_s=later.least_round_trip_us / 1e6 if sampled else None,
        estimated_bytes_per_s=later.estimated_bytes_per_s or None,
        **_shown(StreamReport, counters),
    )


def _stalls(
    direction: str, before: Mapping[int, StreamSlot], streams: Sequence[StreamSlot], elapsed_s: float | None
) -> Stalls:
    pairs = [(before[one.index], one) for one in streams if one.index in before]
    if not elapsed_s or not pairs:
        return Stalls(None, None, None, None)
    if direction == "receive":
        parked_s = sum(later.counters["parked_ns"] - earlier.counters["parked_ns"] for earlier, later in pairs) / 1e9
        # A stream that is parked now adds its time when it goes on.
        parked_s += elapsed_s * sum(
            later.state == "parked" and later.counters["parked"] == earlier.counters["parked"]
            for earlier, later in pairs
        )
        return Stalls(None, None, None, _share(parked_s, elapsed_s * len(pairs)))
    worker_s = (
        sum(later.counters["worker_wait_ns"] - earlier.counters["worker_wait_ns"] for earlier, later in pairs) / 1e9
    )
    # The kernel's times are of the moments when it was asked.
    asked = [
        (earlier.counters, later.counters, (later.sampled_ms - earlier.sampled_ms) / 1000)
        for earlier, later in pairs
        if later.sampled_ms > earlier.sampled_ms > 0
    ]
    asked = [one for one in asked if one[1]["busy_us"] > one[0]["busy_us"]]
    if not asked:
        return Stalls(None, None, _share(worker_s, elapsed_s), None)
    seconds = sum(one[2] for one in asked)
    peer_s = sum(later["peer_not_reading_us"] - earlier["peer_not_reading_us"] for earlier, later, _ in asked) / 1e6
    busy_s = sum(later["busy_us"] - earlier["busy_us"] for earlier, later, _ in asked) / 1e6
    return Stalls(_share(peer_s, seconds), _share(busy_s - peer_s, seconds), _share(worker_s, elapsed_s), None)


def _key(comm: CommSlot) -> tuple[int, int]:
    return comm.slot, comm.opened_ms


def _streams_by_comm(process: ProcessSnapshot) -> dict[int, list[StreamSlot]]:
    found: dict[int, list[StreamSlot]] = {}
    for stream in process.page.streams:
        found.setdefault(stream.comm, []).append(stream)
    return found


def _sums(process: ProcessSnapshot) -> Counts:
    """Of comms and streams, those that are closed included."""
    page = process.page
    sums = Counter(page.closed_comms | page.closed_streams)
    for counts in [one.counters for one in page.comms] + [one.counters for one in page.streams]:
        sums.update(counts)
    return sums


@cache
def _names(report: type) -> frozenset[str]:
    return frozenset(one.name for one in fields(report))


def _shown(report: type, counts: Counts) -> dict[str, Any]:
    """Those for which the report has a field. Its times are in seconds."""
    found: dict[str, Any] = {}
    for name, count in counts.items():
        scale = _PER_SECOND.get(name[-3:])
        found |= {name: count} if scale is None else {f"{name[:-3]}_s": count / scale}
    return {name: value for name, value in found.items() if name in _names(report)}


def _sent_bytes(counters: Counts) -> int:
    return counters["inline_bytes"] + counters["striped_bytes"]


def _bytes(counters: Counts) -> int:
    return _sent_bytes(counters) + counters["received_bytes"]


def _cpu(process: ProcessSnapshot) -> float:
    return sum(process.thread_seconds.values())


def _rate(amount: float, elapsed_s: float | None) -> float | None:
    return None if not elapsed_s else max(0.0, amount) / elapsed_s


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _or_none(number: int) -> int | None:
    return number if number >= 0 else None
