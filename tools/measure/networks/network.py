"""A network of the comparison: this host's loopback, or an emulated link with a rate, a delay and a limit per flow."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from netlab import Lab, parse_delay_ms, parse_rate_mbit

from bagua.net.bench.gpu_sharing import GpuSharing
from bagua.net.bench.result_file import Label
from measure.ranks.lab_placement import LabPlacement
from measure.ranks.placement import HostPlacement, Placement

LOOPBACK = "loopback"
# Beyond a bandwidth-delay product: 10 Gb/s with a round trip of 10 ms has 12.5 MB in flight.
_DELAYED_TCP_BUFFER = 64 << 20
_PATTERN = re.compile(r"(?P<rate>[^+@]+)(\+(?P<delay>[^+@]+))?(@(?P<flow>[^+@]+))?")


@dataclass(frozen=True)
class Network:
    """
    Attributes:
        rate_mbit: of each link and direction; None: loopback.
        delay_ms: of each packet, one way.
        per_flow_mbit: of each TCP connection; None: no limit.
    """

    name: str
    rate_mbit: float | None = None
    delay_ms: float = 0.0
    per_flow_mbit: float | None = None

    def labels(self) -> dict[str, Label]:
        """As result files name a network."""
        rate = None if self.rate_mbit is None else self.rate_mbit / 1e3
        flow = {} if self.per_flow_mbit is None else {"per_flow_gbps": self.per_flow_mbit / 1e3}
        return {"rate_gbps": rate, "delay_ms": self.delay_ms, **flow}

    @contextlib.contextmanager
    def placement(self, ranks: int, device: str, sharing: GpuSharing | None) -> Iterator[Placement]:
        """Where ranks run that are joined by this network. Emulation needs root."""
        if self.rate_mbit is None:
            yield HostPlacement(sharing)
            return
        buffer = _DELAYED_TCP_BUFFER if self.delay_ms else None
        limits = {"delay_ms": self.delay_ms, "per_flow_mbit": self.per_flow_mbit, "tcp_buffer_bytes": buffer}
        gpus = None if device == "cpu" else ranks if sharing is None else sharing.gpus
        with Lab(ranks, rate_mbit=self.rate_mbit, **limits) as lab:  # type: ignore[arg-type]
            yield LabPlacement(lab, gpus=gpus)


def parse_network(text: str) -> Network:
    """`loopback`, or RATE[+DELAY][@RATE_PER_FLOW]: `25G`, `10G+5ms`, `3200M@400M`.

    Raises:
        ValueError: the text is not a network.
    """
    if text == LOOPBACK:
        return Network(text)
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"network {text!r} is not RATE[+DELAY][@RATE_PER_FLOW]; write loopback, 25G, 10G+5ms or 5G@500M"
        )
    delay = parse_delay_ms(match["delay"]) if match["delay"] else 0.0
    return Network(
        text, parse_rate_mbit(match["rate"]), delay, parse_rate_mbit(match["flow"]) if match["flow"] else None
    )
