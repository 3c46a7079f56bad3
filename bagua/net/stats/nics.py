"""What each network interface of a process carries, and how people read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagua.net.stats.layout import Page
from bagua.net.stats.quantities import rate_text, seconds_text, share_text
from bagua.net.stats.reports import NicReport

_VERBS = {"removed": "was removed", "down": "is down", "no carrier": "has no carrier", "no address": "lost its address"}


@dataclass
class _Carried:
    sent: int = 0
    received: int = 0
    streams_live: int = 0
    retransmits: int = 0


def nic_reports(earlier: Page | None, later: Page, elapsed_s: float | None, now_ms: int) -> list[NicReport]:
    """
    Args:
        now_ms: of the monotonic clock.
    """
    carried = _carried(later)
    before = [_Carried()] * len(carried) if earlier is None else _carried(earlier)
    sent = [_rate(now.sent - then.sent, elapsed_s) for now, then in zip(carried, before, strict=True)]
    received = [_rate(now.received - then.received, elapsed_s) for now, then in zip(carried, before, strict=True)]
    total = sum(one or 0.0 for one in (*sent, *received))
    return [
        NicReport(
            name=nic.name,
            state=nic.state,
            state_age_s=max(0.0, (now_ms - nic.since_ms) / 1000) if nic.since_ms else None,
            speed_mbps=nic.speed_mbps or None,
            sent_bytes=carried[slot].sent,
            received_bytes=carried[slot].received,
            sent_bytes_per_s=sent[slot],
            received_bytes_per_s=received[slot],
            share=((sent[slot] or 0.0) + (received[slot] or 0.0)) / total if total else None,
            # The peer's connections over it are open until it opens others, and carry nothing.
            streams_live=carried[slot].streams_live if nic.state in (None, "up") else 0,
            streams_lost=nic.streams_lost,
            downs=nic.downs,
            retransmits=carried[slot].retransmits,
        )
        for slot, nic in enumerate(later.nics)
        if nic is not None
    ]


def _carried(page: Page) -> list[_Carried]:
    """By slot."""
    found = [
        _Carried() if nic is None else _Carried(nic.closed_sent_bytes, nic.closed_received_bytes) for nic in page.nics
    ]
    directions = {comm.slot: comm.direction for comm in page.comms}
    for stream in page.streams:
        if stream.nic is None:
            continue
        one = found[stream.nic]
        amount = stream.counters["bytes"] - stream.bytes_over_other_nics
        if directions.get(stream.comm) == "send":
            one.sent += amount
        else:
            one.received += amount
        one.streams_live += stream.state in ("live", "parked")
        one.retransmits += stream.counters["retransmits"]
    return found


def _rate(amount: int, elapsed_s: float | None) -> float | None:
    return max(0, amount) / elapsed_s if elapsed_s else None


def is_worth_showing(nics: Sequence[NicReport]) -> bool:
    """Where one NIC carries all and nothing happened to it, the sums of the process say the same."""
    return len(nics) > 1 or any(nic.is_unusable or nic.downs or nic.streams_lost for nic in nics)


def state_text(nic: NicReport) -> str:
    """`eth1 has no carrier, for 4 s`."""
    age = "" if nic.state_age_s is None else f", for {seconds_text(nic.state_age_s)}"
    return f"{nic.name} {_VERBS.get(str(nic.state), f'is {nic.state}')}{age}"


def host_line(processes: Iterable[Sequence[NicReport]]) -> str | None:
    """`eth0 1.2 GB/s, 90 %; eth1 0 B/s, 0 %, no carrier`: of all processes of a host. None: there is nothing to say."""
    by_name: dict[str, list[NicReport]] = {}
    for nics in processes:
        if is_worth_showing(nics):
            for nic in nics:
                by_name.setdefault(nic.name, []).append(nic)
    rates = {name: [rate for one in nics for rate in _rates(one)] for name, nics in by_name.items()}
    total = sum(sum(one) for one in rates.values())
    parts = []
    for name, nics in by_name.items():
        rate = sum(rates[name])
        states = [str(one.state) for one in nics if one.is_unusable]
        words = [f"{name} {rate_text(rate if rates[name] else None)}", share_text(rate / total if total else None)]
        parts.append(", ".join(words + states[:1]))
    return "; ".join(parts) or None


def _rates(nic: NicReport) -> list[float]:
    return [rate for rate in (nic.sent_bytes_per_s, nic.received_bytes_per_s) if rate is not None]
