"""What an all-reduce between the two hosts can reach, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagua.net.doctor.peer.bandwidth import RECEIVED, SENT, Bandwidth, Rate
from bagua.net.doctor.peer.facts import HostFacts

# A link of 10 Gb/s carries 9.4 of payload at an MTU of 1500.
_LINK_SHARE = 0.85
# Four connections that are not limited one by one get no more than 1.3 times what one gets, in our measurements.
_SCALES = 2.0
_AS_GOOD = 0.95
_BUFFER_SHARE = 0.5
_CPU_SHARE = 0.75


@dataclass(frozen=True)
class Reach:
    """
    Attributes:
        busbw_bytes_per_s: of a ring: what the slower direction carries.
        streams: with how many connections.
        limit: one of "link", "connection", "buffers", "cpu", "path", "joined".
        text: what limits it, for the user.
        per_connection_bytes_per_s: where connections are limited one by one; else None.
    """

    busbw_bytes_per_s: float
    streams: int
    limit: str
    text: str
    per_connection_bytes_per_s: float | None = None


def best_of(rates: Mapping[int, Rate]) -> Rate:
    """With the fewest connections that are as good as the best number."""
    enough = _AS_GOOD * max(rate.median for rate in rates.values())
    return min((rate for rate in rates.values() if rate.median >= enough), key=lambda rate: rate.streams)


def reach_of(
    bandwidth: Bandwidth, here: HostFacts, there: HostFacts, speed_mbps: int, round_trip_s: float | None
) -> Reach | None:
    """
    Args:
        speed_mbps: of the slower of the two interfaces; 0: unknown.

    Returns:
        None if a direction has no rates.
    """
    ways = [bandwidth.of(direction) for direction in (SENT, RECEIVED)]
    if not all(ways):
        return None
    slower = min(ways, key=lambda rates: best_of(rates).median)
    best = best_of(slower)
    limit, text, cap = _limit(slower, best, here, there, speed_mbps, round_trip_s)
    return Reach(best.median, best.streams, limit, text, cap)


def _limit(
    rates: Mapping[int, Rate],
    best: Rate,
    here: HostFacts,
    there: HostFacts,
    speed_mbps: int,
    round_trip_s: float | None,
) -> tuple[str, str, float | None]:
    one, four, most = (rates[streams].median for streams in (1, 4, 16))
    cap = one if four >= _SCALES * one else None
    if speed_mbps and best.median * 8e-6 >= _LINK_SHARE * speed_mbps:
        return "link", f"the link, of {speed_mbps / 1e3:g} Gb/s", cap
    if cap is not None and most >= _SCALES * four:
        buffer = min(here.tcp_wmem_max or 1 << 62, there.tcp_rmem_max or 1 << 62)
        if round_trip_s is not None and one * round_trip_s >= _BUFFER_SHARE * buffer:
            text = (
                f"TCP's buffers: {buffer >> 10} KiB per connection and round trip; raise net.ipv4.tcp_wmem and"
                " net.ipv4.tcp_rmem on both hosts"
            )
            return "buffers", text, cap
        return "connection", f"each connection, which gets about {gbit(one)}; more of them would carry more", cap
    cpus = here.cpus if here.identity == there.identity else here.cpus + there.cpus
    if best.cpus >= _CPU_SHARE * cpus:
        return "cpu", f"the CPUs: {best.cpus:.1f} of the {cpus} of both ends are busy with it", cap
    return "path", "the path between the hosts: a switch, or the limit of a virtual network", cap


def gbit(bytes_per_s: float) -> str:
    """Three digits: "9.41 Gb/s", "94.1 Mb/s"."""
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"
