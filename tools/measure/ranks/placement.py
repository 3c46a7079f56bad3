"""Where rank processes run: on this host, or each on a host of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bagua.net.bench.api import GpuSharing


class Placement(Protocol):
    """See HostPlacement, and LabPlacement with network namespaces."""

    store_host: str  # where rank 0's store is found by all ranks
    alone_on_node: bool  # every rank is a node

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """What starts `command` where the rank runs. The process that is started becomes it."""

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of one rank, which override those that all ranks have."""


class HostPlacement:
    """All ranks on this host, as one node, over loopback; several on a GPU if they share."""

    store_host = "127.0.0.1"
    alone_on_node = False

    def __init__(self, sharing: GpuSharing | None = None) -> None:
        self._sharing = sharing

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return list(command)

    def environment(self, rank: int) -> dict[str, str]:
        return {} if self._sharing is None else self._sharing.environment(rank)
