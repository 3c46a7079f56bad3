"""The NICs of each host of an emulated network: `10G/2500M`, `10G/10G+5ms`, `10G/1G~1%`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from netlab import Lab
from netlab.offload import disable_segmentation_offload

from measure.network import Network, parse_network

HOSTS = 2
MOST_NICS = 8


@dataclass(frozen=True)
class NicSet:
    """The first NIC is the best one: the one that would be chosen if only one could be used."""

    name: str
    nics: tuple[Network, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def interfaces(self) -> list[str]:
        return [f"eth{number}" for number in range(len(self.nics))]

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
            # The kernel has one limit for all NICs.
            tcp_buffer_bytes=max(nic.tcp_buffer_bytes or 0 for nic in self.nics) or None,
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
    nics = tuple(parse_network(part) for part in text.split("/"))
    if any(nic != Network(nic.name, nic.rate_mbit, nic.delay_ms, loss=nic.loss) or not nic.rate_mbit for nic in nics):
        raise ValueError(f"{text!r} has more than RATE[+DELAY][~LOSS] of a NIC; write 10G, 10G+5ms or 1G~1%")
    if not 2 <= len(nics) <= MOST_NICS:
        raise ValueError(f"{text!r} has {len(nics)} NICs; give 2 to {MOST_NICS} with a slash between them: 10G/2500M")
    return NicSet(text, nics)
