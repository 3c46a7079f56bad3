"""What a --peers run measured, before it is made into rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua.net.bench.peers.session import Footprint, IdleCost, TrafficSample


@dataclass
class PeersResults:
    """Sessions are named as PeersSession.name does: "plugin x64"."""

    samples: dict[tuple[str, int], list[TrafficSample]]  # (session, message size): one a repetition
    wrong: dict[tuple[str, int], str] = field(default_factory=dict)  # (session, message size): what was wrong
    footprints: dict[str, list[Footprint]] = field(default_factory=dict)  # by rank, at the end of the silence
    idle: dict[str, IdleCost] = field(default_factory=dict)
