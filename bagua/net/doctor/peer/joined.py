"""The pairs of network interfaces that joined devices of the two ends would use, each measured alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bagua.net.doctor.finding import Section, ok, skip, warn
from bagua.net.doctor.peer.bandwidth import RECEIVED, SENT, Bandwidth
from bagua.net.doctor.peer.facts import HostFacts, InterfaceFacts
from bagua.net.doctor.peer.reach import Reach, gbit
from bagua.network_interfaces import source_address

# Connections of each pair.
STREAMS = 4


@dataclass
class NicPair:
    """
    Attributes:
        local, remote: addresses.
    """

    here: str
    local: str
    there: str
    remote: str
    bandwidth: Bandwidth = field(default_factory=Bandwidth)

    @property
    def name(self) -> str:
        return f"{self.here} to {self.there} ({self.remote})"

    def bytes_per_s(self, direction: str) -> float:
        rates = self.bandwidth.of(direction)
        return rates[STREAMS].median if STREAMS in rates else 0.0


def joined_pairs(local: str, remote: str, here: HostFacts, there: HostFacts) -> list[NicPair]:
    """By the kernel's routes, the pair of the given addresses first. Empty where nothing is joined."""
    ours, theirs = here.interface_of(local), there.interface_of(remote)
    if ours is None or theirs is None:
        return []
    own, peers = here.joined_with(ours), there.joined_with(theirs)
    if len(own) == len(peers) == 1:
        return []
    pairs = [NicPair(ours.name, local, theirs.name, remote)]
    for interface in peers:
        address = _address_like(remote, interface)
        source = source_address(address) if address and interface != theirs else ""
        pairs += [NicPair(one.name, source, interface.name, address) for one in own if source in one.addresses]
    return pairs


def _address_like(address: str, interface: InterfaceFacts) -> str:
    """The first of its family; "": none that other hosts can name."""
    found = [one for one in interface.addresses if (":" in one) == (":" in address)]
    return next((one for one in found if not one.lower().startswith("fe80")), "")


def check_joined(pairs: Sequence[NicPair], local: str, remote: str, here: HostFacts, there: HostFacts) -> Section:
    """Of a device that has joined interfaces, at either end."""
    findings = []
    sums = {way: sum(pair.bytes_per_s(way) for pair in pairs) for way in (SENT, RECEIVED)}
    findings.append(
        ok(
            f"{len(pairs)} pairs of joined interfaces, measured one after the other over {STREAMS} connections: "
            f"{gbit(sums[SENT])} sent and {gbit(sums[RECEIVED])} received in all"
        )
    )
    for pair in pairs:
        for direction, why in pair.bandwidth.failed.items():
            findings.append(
                warn(
                    f"nothing could be {direction} over {pair.name}: {why}",
                    "route both networks, and open all TCP ports on them; until then the other pairs carry its share",
                )
            )
    for where, facts, address, used in (
        ("here", here, local, {pair.here for pair in pairs}),
        ("there", there, remote, {pair.there for pair in pairs}),
    ):
        interface = facts.interface_of(address)
        findings += [
            skip(f"{one.name} {where}: the kernel routes to no joined interface of the other end")
            for one in (facts.joined_with(interface) if interface else ())
            if one.name not in used
        ]
    rows = [("interface", "peer's", "sent", "received")]
    rows += [
        (pair.here, f"{pair.there} ({pair.remote})", gbit(pair.bytes_per_s(SENT)), gbit(pair.bytes_per_s(RECEIVED)))
        for pair in pairs
    ]
    facts_json = {
        "pairs": [
            {
                "here": pair.here,
                "local_address": pair.local,
                "there": pair.there,
                "remote_address": pair.remote,
                **{f"{way}_bytes_per_s": pair.bytes_per_s(way) for way in (SENT, RECEIVED)},
            }
            for pair in pairs
        ]
    }
    return Section("joined", "Joined interfaces", tuple(findings), facts_json, tuple(rows))


def together(reach: Reach, pairs: Sequence[NicPair]) -> Reach:
    """What a ring can reach over all pairs, of what it can over the first."""
    sums = [sum(pair.bytes_per_s(way) for pair in pairs) for way in (SENT, RECEIVED)]
    text = f"the joined interfaces together, if they share nothing on the way; {pairs[0].name} alone: {reach.text}"
    return replace(reach, busbw_bytes_per_s=min(sums), streams=STREAMS * len(pairs), limit="joined", text=text)
