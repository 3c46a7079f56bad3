"""Ranks on the hosts of a lab: each in a network namespace of its own, as a node of its own."""

from __future__ import annotations

from collections.abc import Sequence

from netlab import Lab

# Set by the rank itself from what its parent says, or not needed: there is no launcher.
_OWN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


class LabPlacement:
    """Implements rank_team.placement.Placement. On GPUs, rank k sees GPU k alone (netlab's --gpu-each)."""

    alone_on_node = True

    def __init__(self, lab: Lab, *, one_gpu_each: bool) -> None:
        self._lab = lab
        self._one_gpu_each = one_gpu_each
        self.store_host = lab.hosts[0].address()

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        return self._lab.entering(rank, command)

    def environment(self, rank: int) -> dict[str, str]:
        settings = self._lab.rank_environment(rank)
        found = {name: value for name, value in settings.items() if name not in _OWN}
        return {**found, "CUDA_VISIBLE_DEVICES": str(rank)} if self._one_gpu_each else found
