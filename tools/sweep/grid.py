"""The networks of a sweep: rates times delays, and which of them this machine can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# TCP's headers take 6 % at an MTU of 1500; a rate of which the machine moves less than this part, it cannot move.
_LEAST_SHARE = 0.85
# A connection shall never wait for its buffers: these hold what is under way in this many round trips.
_ROUND_TRIPS_BUFFERED = 4
_TCP_BUFFER_LIMITS = (32 << 20, 512 << 20)


@dataclass(frozen=True)
class Network:
    """One cell. The delay is one way; a round trip takes twice as long."""

    rate_gbit: float
    delay_ms: float

    def __str__(self) -> str:
        return f"{self.rate_gbit:g} Gb/s, {self.delay_ms:g} ms"

    @property
    def tcp_buffer_bytes(self) -> int | None:
        """None: what the machine has by itself."""
        if not self.delay_ms:
            return None
        product = self.rate_gbit * 1e9 / 8 * 2 * self.delay_ms * 1e-3
        low, high = _TCP_BUFFER_LIMITS
        return int(min(high, max(low, _ROUND_TRIPS_BUFFERED * product)))


@dataclass(frozen=True)
class PlannedNetwork:
    """`is_limited` is False where the machine is slower than the rate: there is no limit then but the machine itself.
    Of several such rates the lowest is measured; for the others `measured_as` names it."""

    network: Network
    is_limited: bool = True
    measured_as: Network | None = None


def plan_networks(
    rates_gbit: Sequence[float], delays_ms: Sequence[float], capacity_gbit: Mapping[bool, float]
) -> list[PlannedNetwork]:
    """Rates ascending within each delay, delays ascending.

    Args:
        capacity_gbit: what the machine moves without a limit, by whether there is a delay.
    """
    planned = []
    for delay in sorted(set(delays_ms)):
        fastest: Network | None = None
        for rate in sorted(set(rates_gbit)):
            network = Network(rate, delay)
            if capacity_gbit[delay > 0] >= _LEAST_SHARE * rate:
                planned.append(PlannedNetwork(network))
            else:
                planned.append(PlannedNetwork(network, is_limited=False, measured_as=fastest))
                fastest = fastest or network
    return planned


def in_measuring_order(planned: Sequence[PlannedNetwork]) -> list[PlannedNetwork]:
    """The networks to be measured, those first whose steps are short: if time runs out, the most cells are known."""
    measured = [one for one in planned if one.measured_as is None]
    return sorted(measured, key=lambda one: (one.network.delay_ms, -one.network.rate_gbit))
