"""The rank processes, seen from the tool that started them: asked, ended. Main thread only: they die with it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bagua
from bagua.net.bench.api import DriverGroup, Event, ask, gather, rank_command
from measure.ranks.placement import HostPlacement, Placement

# Interpreters load torch, and the process group forms.
START_TIMEOUT_S = 180.0
# Of a launcher that the tool itself may run under.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT")


class RankTeam:
    """All ranks of one process group, each `python -m MODULE` with measure.ranks.rank_process in it. Whatever goes
    wrong with one of them is a BenchError, after which the team can only be closed: the others may be waiting for it in
    a collective.

    Args:
        module: what the interpreters run.
        device: "cuda", where the placement says which GPU a rank has, or "cpu".
        timeout_s: of a collective.
        environment: of a rank, by its number; see rank_environment.
        placement: by default this host.
        join: what the ranks are told when they join, besides the store.
        form: False: only start the interpreters; the caller forms the group with `form`. So several teams load torch at
            the same time.
    """

    def __init__(
        self,
        module: str,
        ranks: int,
        device: str,
        *,
        timeout_s: float,
        environment: Callable[[int], Mapping[str, str]],
        placement: Placement | None = None,
        join: Mapping[str, object] | None = None,
        form: bool = True,
    ) -> None:
        """Raises BenchError when the ranks cannot be started."""
        self._drivers = DriverGroup()
        self._placement = placement = placement or HostPlacement()
        self._join = join or {}
        self.facts: Mapping[str, Any] = {}
        try:
            self._ranks = [
                self._drivers.start(
                    f"rank {rank}",
                    placement.command(
                        rank,
                        rank_command(
                            module,
                            rank,
                            ranks,
                            local_rank=0 if placement.alone_on_node else rank,
                            device=device,
                            backend="cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                            timeout_s=timeout_s,
                            bind="127.0.0.1",
                        ),
                    ),
                    {**environment(rank), **placement.environment(rank)},
                )
                for rank in range(ranks)
            ]
            if form:
                self.form()
        except BaseException:
            self._drivers.close(failed=True)
            raise

    def form(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Makes the process group of the started interpreters. Raises BenchError when it cannot be formed."""
        store = gather(self._ranks[:1], "store", timeout_s, "starting")[0]
        line = {"op": "join", "host": self._placement.store_host, "port": store["port"], **self._join}
        line["alone_on_node"] = self._placement.alone_on_node
        self.facts = ask(self._ranks, json.dumps(line), "ready", timeout_s)[0]

    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]:
        """One answer of each rank, in their order."""
        return ask(self._ranks, json.dumps({"op": operation, **fields}), operation, timeout_s)

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)


def rank_environment(
    inherited: Mapping[str, str] = os.environ,
    *,
    settings: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """`settings` come on top of all others."""
    environment = {name: value for name, value in inherited.items() if name not in _LAUNCHER}
    # The package is found where the parent found it, also when that is no installation.
    paths = [Path(bagua.__file__).resolve().parents[1], Path(__file__).resolve().parents[2]]
    further = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = ":".join([*map(str, paths), *([further] if further else [])])
    environment["PYTHONSAFEPATH"] = "1"  # the working directory may be a checkout, without compiled modules
    environment["ENABLE_BAGUA_NET"] = "0"
    environment["OMP_NUM_THREADS"] = "1"
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A program that uses NVLink multicast can harm other users of a host's GPUs.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    return {**environment, **(settings or {})}


def on_this_host(
    module: str, given: argparse.Namespace, timeout_s: float, settings: Mapping[str, str] | None = None
) -> Callable[[], RankTeam]:
    """What starts `given.ranks` ranks of a module; see measure.options.add_ranks."""
    return lambda: RankTeam(
        module,
        given.ranks,
        given.device,
        timeout_s=timeout_s,
        environment=lambda _: rank_environment(settings=settings),
        placement=HostPlacement(given.sharing),
    )
