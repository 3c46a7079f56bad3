"""Where ranks meet: this host's loopback, or an emulated link: its rate, delay and limit per flow, its MTU, and what
programs are told of its speed."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from netlab import SPEEDS, TOLD, Lab, LinkPlan, parse_delay_ms, parse_rate_mbit
from netlab.link_plan import UNLIMITED_MBIT, parse_loss

from bagua.net.bench.api import MISSING, Label, within
from measure.processes import Placement
from measure.runner import several

LOOPBACK = "loopback"
FREE = "free"
# A connection shall never wait for its buffers: these hold what is under way in this many round trips.
_ROUND_TRIPS_BUFFERED = 4
_TCP_BUFFER_LIMITS = (32 << 20, 512 << 20)
# From this many on, each host has CPUs of its own, as where users are: threads of one that poll take nothing from the
# other. With fewer, a rank would have to share its CPU with the threads of its network.
_CPUS_OF_A_HOST = 4
_PATTERN = re.compile(
    r"(?P<rate>[^+~@:]+)(\+(?P<delay>[^+~@:]+))?(~(?P<loss>[^+~@:]+))?(@(?P<flow>[^+~@:]+))?(:(?P<mtu>\d+))?"
    rf"(:(?P<speed>{'|'.join(SPEEDS)}))?"
)


@dataclass(frozen=True)
class Network:
    """
    Attributes:
        rate_mbit: of each link and direction; None: no limit, or loopback.
        delay_ms: of each packet, one way.
        per_flow_mbit: of each TCP connection; None: no limit.
        mtu: of each link.
        speed: what /sys tells of it; see netlab.Lab.
        loss: share of the packets, in each direction.
    """

    name: str
    rate_mbit: float | None = None
    delay_ms: float = 0.0
    per_flow_mbit: float | None = None
    mtu: int = 1500
    speed: str = TOLD
    loss: float = 0.0

    def __str__(self) -> str:
        return self.name

    def labels(self) -> dict[str, Label]:
        """As result files name a network."""
        rate = None if self.rate_mbit is None else self.rate_mbit / 1e3
        flow = {} if self.per_flow_mbit is None else {"per_flow_gbps": self.per_flow_mbit / 1e3}
        told = {} if self.told_mbit is None else {"told_mbps": self.told_mbit, "mtu": self.mtu}
        lossy = {"loss": self.loss} if self.loss else {}
        return {"rate_gbps": rate, "delay_ms": self.delay_ms, **lossy, **flow, **told}

    @property
    def is_emulated(self) -> bool:
        return self.name != LOOPBACK

    @property
    def told_mbit(self) -> int | None:
        """The speed that /sys tells; None: loopback, of which it tells none."""
        return LinkPlan(self.rate_mbit).speed_mbit(self.speed) if self.is_emulated else None

    @property
    def tcp_buffer_bytes(self) -> int | None:
        """None: what the machine has by itself."""
        if not self.delay_ms:
            return None
        product = (self.rate_mbit or UNLIMITED_MBIT) * 1e6 / 8 * 2 * self.delay_ms * 1e-3
        low, high = _TCP_BUFFER_LIMITS
        return int(min(high, max(low, _ROUND_TRIPS_BUFFERED * product)))

    @contextlib.contextmanager
    def placement(self, given: argparse.Namespace) -> Iterator[Placement]:
        """Where ranks run that are joined by this network. Emulation needs root; raises NetlabError."""
        if not self.is_emulated:
            yield Placement(sharing=given.sharing)
            return
        gpus = None if given.device == "cpu" else given.ranks if given.sharing is None else given.sharing.gpus
        ranks_per_host = getattr(given, "ranks_per_host", 1)
        hosts = given.ranks // ranks_per_host
        with Lab(
            hosts,
            rate_mbit=self.rate_mbit,
            delay_ms=self.delay_ms,
            per_flow_mbit=self.per_flow_mbit,
            mtu=self.mtu,
            loss=self.loss,
            segmentation_offload=not self.loss,  # else a lost packet has up to 64 KiB
            speed=self.speed,
            tcp_buffer_bytes=self.tcp_buffer_bytes,
            own_cpus=len(os.sched_getaffinity(0)) >= hosts * _CPUS_OF_A_HOST,
        ) as lab:
            yield Placement(lab, ranks_per_host=ranks_per_host, gpus=gpus)


def parse_network(text: str) -> Network:
    """`loopback`, or RATE[+DELAY][~LOSS][@RATE_PER_FLOW][:MTU][:SPEED]: `25G`, `10G+5ms`, `1G~1%`, `3200M@400M`,
    `free:9000:veth`.

    Raises:
        ValueError: the text is not a network.
    """
    if text == LOOPBACK:
        return Network(text)
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"network {text!r} is not RATE[+DELAY][~LOSS][@RATE_PER_FLOW][:MTU][:SPEED]; write loopback, free, 25G,"
            " 10G+5ms, 1G~1%, 5G@500M or 25G:9000:veth"
        )
    network = Network(
        text,
        None if match["rate"] == FREE else parse_rate_mbit(match["rate"]),
        parse_delay_ms(match["delay"]) if match["delay"] else 0.0,
        parse_rate_mbit(match["flow"]) if match["flow"] else None,
        int(match["mtu"] or Network.mtu),
        match["speed"] or TOLD,
        parse_loss(match["loss"]) if match["loss"] else 0.0,
    )
    LinkPlan(network.rate_mbit, network.per_flow_mbit, network.mtu)  # raises ValueError
    return network


def told_text(name: str) -> str:
    """For a table: the speed in Mb/s that programs are told in the network of this name."""
    told = parse_network(name).told_mbit
    return MISSING if told is None else str(told)


NETWORK_HELP = (
    "loopback, or emulated as RATE[+DELAY][~LOSS][@RATE_PER_FLOW][:MTU][:SPEED], as root: 25G,10G+5ms,5G:9000"
)
NETWORKS = ("networks", several(parse_network), LOOPBACK, NETWORK_HELP)
RANKS_PER_HOST = (
    "ranks-per-host",
    within(int, 1, 64),
    1,
    "of an emulated network; within a host, NCCL communicates as it does",
)


def check_hosts(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Ends the program if --ranks-per-host does not fit to the number of ranks."""
    hosts, rest = divmod(given.ranks, given.ranks_per_host)
    if rest or (given.ranks_per_host > 1 and hosts < 2):
        parser.error(
            f"--ranks-per-host {given.ranks_per_host} does not divide --nproc-per-node {given.ranks} into two hosts"
            " or more; give the ranks of all hosts together, such as --nproc-per-node 4 --ranks-per-host 2"
        )
