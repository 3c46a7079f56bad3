"""Ranks on the hosts of a lab: each in a network namespace of its own, as a node of its own."""

from __future__ import annotations

from collections.abc import Sequence

from netlab import Lab

from bagua.net.bench.api import gpu_name

# Set by the rank itself from what its parent says, or not needed: there is no launcher.
_OWN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


class LabPlacement:
    """Implements measure.ranks.placement.Placement.

    Args:
        gpus: rank k sees one of them alone: GPU k, modulo their number.
        interfaces: that NCCL may use; None: all.
    """

    alone_on_node = True

    def __init__(self, lab: Lab, *, gpus: int | None = None, interfaces: Sequence[str] | None = None) -> None:
        self.lab = lab
        self._gpus = gpus
        self._interfaces = interfaces
        self.store_host = lab.hosts[0].address()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return self.lab.entering(rank, command)

    def environment(self, rank: int) -> dict[str, str]:
        settings = self.lab.rank_environment(rank)
        found = {name: value for name, value in settings.items() if name not in _OWN}
        if self._interfaces is not None:
            found["NCCL_SOCKET_IFNAME"] = "=" + ",".join(self._interfaces)
        return found if self._gpus is None else {**found, "CUDA_VISIBLE_DEVICES": gpu_name(rank % self._gpus)}
