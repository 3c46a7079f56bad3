"""The NICs of each host of an emulated network: `10G/2500M`, `10G/10G+5ms`, `10G/1G~1%`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from netlab import Lab, parse_delay_ms, parse_rate_mbit
from netlab.link_plan import parse_loss
from netlab.offload import disable_segmentation_offload

from measure.network import Network

HOSTS = 2
MOST_NICS = 8
_NIC = re.compile(r"(?P<rate>[^+~]+)(\+(?P<delay>[^+~]+))?(~(?P<loss>[^+~]+))?")


@dataclass(frozen=True)
class Nic:
    """
    Attributes:
        rate_mbit: of each direction.
        delay_ms: of each packet, one way.
        loss: share of the packets, in each direction.
    """

    rate_mbit: float
    delay_ms: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class NicSet:
    """The first NIC is the best one: the one that would be chosen if only one could be used."""

    name: str
    nics: tuple[Nic, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def interfaces(self) -> list[str]:
        return [f"eth{number}" for number in range(len(self.nics))]

    @property
    def tcp_buffer_bytes(self) -> int | None:
        """The kernel has one limit for all NICs."""
        needs = [Network(self.name, nic.rate_mbit, nic.delay_ms).tcp_buffer_bytes for nic in self.nics]
        return max((need for need in needs if need is not None), default=None)

    @contextlib.contextmanager
    def lab(self) -> Iterator[Lab]:
        """Two hosts with these NICs. Raises NetlabError."""
        with Lab(
            HOSTS,
            len(self.nics),
            rate_mbit=[nic.rate_mbit for nic in self.nics],
            delay_ms=[nic.delay_ms for nic in self.nics],
            loss=[nic.loss for nic in self.nics],
            ip_versions=(4,),
            tcp_buffer_bytes=self.tcp_buffer_bytes,
        ) as lab:
            for host in lab.hosts:
                for name, nic in zip(host.interfaces, self.nics, strict=True):
                    if nic.loss:
                        # Else a lost packet has up to 64 KiB. Of this NIC alone: small packets take CPU time.
                        with lab.inside(host.index):
                            disable_segmentation_offload(name)
            yield lab


def parse_nic_set(text: str) -> NicSet:
    """RATE[+DELAY][~LOSS] of each NIC, the best one first, with a slash between them.

    Raises:
        ValueError: the text is no such list.
    """
    nics = []
    for part in text.split("/"):
        match = _NIC.fullmatch(part)
        if match is None:
            raise ValueError(f"NIC {part!r} of {text!r} is not RATE[+DELAY][~LOSS]; write 10G, 10G+5ms or 1G~1%")
        delay = parse_delay_ms(match["delay"]) if match["delay"] else 0.0
        nics.append(Nic(parse_rate_mbit(match["rate"]), delay, parse_loss(match["loss"]) if match["loss"] else 0.0))
    if not 2 <= len(nics) <= MOST_NICS:
        raise ValueError(f"{text!r} has {len(nics)} NICs; give 2 to {MOST_NICS} with a slash between them: 10G/2500M")
    return NicSet(text, tuple(nics))
