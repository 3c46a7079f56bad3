"""Where ranks meet: this host's loopback, or an emulated link with a rate, a delay and a limit per flow."""

from __future__ import annotations

import argparse
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
# A connection shall never wait for its buffers: these hold what is under way in this many round trips.
_ROUND_TRIPS_BUFFERED = 4
_TCP_BUFFER_LIMITS = (32 << 20, 512 << 20)
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

    @property
    def is_emulated(self) -> bool:
        return self.rate_mbit is not None

    @property
    def tcp_buffer_bytes(self) -> int | None:
        """None: what the machine has by itself."""
        if self.rate_mbit is None or not self.delay_ms:
            return None
        product = self.rate_mbit * 1e6 / 8 * 2 * self.delay_ms * 1e-3
        low, high = _TCP_BUFFER_LIMITS
        return int(min(high, max(low, _ROUND_TRIPS_BUFFERED * product)))

    @contextlib.contextmanager
    def placement(self, ranks: int, device: str, sharing: GpuSharing | None) -> Iterator[Placement]:
        """Where ranks run that are joined by this network. Emulation needs root."""
        if self.rate_mbit is None:
            yield HostPlacement(sharing)
            return
        gpus = None if device == "cpu" else ranks if sharing is None else sharing.gpus
        with Lab(
            ranks,
            rate_mbit=self.rate_mbit,
            delay_ms=self.delay_ms,
            per_flow_mbit=self.per_flow_mbit,
            tcp_buffer_bytes=self.tcp_buffer_bytes,
        ) as lab:
            yield LabPlacement(lab, gpus=gpus)


def add_networks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--networks",
        type=parse_networks,
        default=LOOPBACK,
        metavar="LIST",
        help="loopback, or emulated as RATE[+DELAY][@RATE_PER_FLOW], which needs root: 25G,10G+5ms,3200M@400M (default"
        " loopback)",
    )


def parse_networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(dict.fromkeys(parse_network(part) for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
