"""What one NIC of one host may do: its rate, the cap of each flow, its MTU; and the spelling of rates."""

from __future__ import annotations

import re
from dataclasses import dataclass

# From Linux: an IPv6 link must carry 1280 bytes; veth takes 65535 at most.
MIN_MTU = 1280
MAX_MTU = 65535
MIN_RATE_MBIT = 1.0
MAX_RATE_MBIT = 400_000.0
MAX_LOSS = 0.5

# What /sys tells programs of a link's speed: the rate, as the driver of a network card does; what the kernel says of
# the links that a lab is made of, as pods of Kubernetes see it; or that it is unknown, as on many clouds.
TOLD, VETH, UNKNOWN = "told", "veth", "unknown"
SPEEDS = (TOLD, VETH, UNKNOWN)
UNLIMITED_MBIT = 100_000  # told of a link without a rate
VETH_MBIT = 10_000
UNKNOWN_MBIT = -1

_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[KMGkmg])(bit)?(/s)?")
_UNIT_MBIT = {"k": 1e-3, "m": 1.0, "g": 1e3}


def parse_rate_mbit(text: str) -> float:
    """`10G`, `2.5G`, `400M` (bits a second, powers of ten) as Mbit/s."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"rate {text!r} is not a number with a unit: write 400M, 2.5G or 10G (bits a second)")
    rate = float(match["number"]) * _UNIT_MBIT[match["unit"].lower()]
    check_rate("rate", rate)
    return rate


def check_rate(name: str, rate_mbit: float) -> None:
    if not MIN_RATE_MBIT <= rate_mbit <= MAX_RATE_MBIT:
        raise ValueError(f"{name} is {rate_mbit:g} Mbit/s; it must be {MIN_RATE_MBIT:g} to {MAX_RATE_MBIT:g} Mbit/s")


_SLOW_FLOWS = re.compile(r"1/(?P<every>\d+)=(?P<rate>.+)")
MAX_SLOW_FLOWS_EVERY = 64


@dataclass(frozen=True)
class SlowFlows:
    """One flow in `every`, on average, has a lower cap than the others. Which ones: their ports decide."""

    every: int
    rate_mbit: float

    def __post_init__(self) -> None:
        if not 1 <= self.every <= MAX_SLOW_FLOWS_EVERY:
            raise ValueError(f"one slow flow in {self.every}; it must be one in 1 to {MAX_SLOW_FLOWS_EVERY}")
        check_rate("rate of slow flows", self.rate_mbit)


def parse_slow_flows(text: str) -> SlowFlows:
    """`1/4=40M`: one flow in four is limited to 40 Mbit/s."""
    match = _SLOW_FLOWS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"slow flows {text!r} are not 1/N=RATE: write 1/4=40M for one flow in four at 40 Mbit/s")
    return SlowFlows(int(match["every"]), parse_rate_mbit(match["rate"]))


def parse_loss(text: str) -> float:
    """`1%` or `0.1%` as a share; `0` is none."""
    match = re.fullmatch(r"0|(?P<percent>\d+(\.\d+)?)%", text.strip())
    if match is None:
        raise ValueError(f"loss {text!r} is not a percentage: write 1% or 0.1%")
    loss = float(match["percent"] or 0) / 100
    check_loss(loss)
    return loss


def check_loss(loss: float) -> None:
    if not 0 <= loss <= MAX_LOSS:
        raise ValueError(f"loss is {loss:g}; it must be 0 to {MAX_LOSS:g} of the packets")


@dataclass(frozen=True)
class LinkPlan:
    """Limits of one NIC, the same in both directions. None is "no limit"."""

    rate_mbit: float | None = None
    per_flow_mbit: float | None = None
    mtu: int = 1500
    slow_flows: SlowFlows | None = None
    loss: float = 0.0  # share of the packets that the switch loses

    def __post_init__(self) -> None:
        if self.rate_mbit is not None:
            check_rate("rate_mbit", self.rate_mbit)
        if self.per_flow_mbit is not None:
            check_rate("per_flow_mbit", self.per_flow_mbit)
        if self.slow_flows is not None and self.per_flow_mbit is None:
            raise ValueError("slow_flows without per_flow_mbit; give the cap of the other flows as well")
        check_loss(self.loss)
        if not MIN_MTU <= self.mtu <= MAX_MTU:
            raise ValueError(f"mtu is {self.mtu}; it must be {MIN_MTU} to {MAX_MTU} bytes (1500 and 9000 are usual)")

    @property
    def is_limited(self) -> bool:
        return self.rate_mbit is not None or self.per_flow_mbit is not None

    def speed_mbit(self, speed: str) -> int:
        """What /sys says, of SPEEDS."""
        if speed == TOLD:
            return UNLIMITED_MBIT if self.rate_mbit is None else max(1, round(self.rate_mbit))
        return VETH_MBIT if speed == VETH else UNKNOWN_MBIT
