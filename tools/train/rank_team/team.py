"""The rank processes, seen from the tool that started them: asked, ended. Main thread only: they die with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bagua
from bagua.net.bench.driver_group import DriverGroup
from bagua.net.bench.endpoint import Event, ask, gather

# Interpreters load torch, and the process group forms.
START_TIMEOUT_S = 180.0
_HOST = "127.0.0.1"
# Of a launcher that the tool itself may run under.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_PORT")


class RankTeam:
    """All ranks of one process group, each `python -m MODULE` with bagua's rank_team.rank_process in it. Whatever goes
    wrong with one of them is a BenchError, after which the team can only be closed: the others may be waiting for it in
    a collective.

    Args:
        module: what the interpreters run.
        device: "cuda", with a GPU for each rank, or "cpu".
        timeout_s: of a collective.
        import_path: folders where `module` and what it imports are found.
        settings: added to the environment.
    """

    def __init__(
        self,
        module: str,
        ranks: int,
        device: str,
        *,
        timeout_s: float,
        import_path: Sequence[Path] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Raises BenchError when the ranks cannot be started."""
        self._drivers = DriverGroup()
        environment = {**_environment(import_path), **(settings or {})}
        try:
            self._ranks = [
                self._drivers.start(f"rank {rank}", _command(module, rank, ranks, device, timeout_s), environment)
                for rank in range(ranks)
            ]
            store = gather(self._ranks[:1], "store", START_TIMEOUT_S, "starting")[0]
            line = json.dumps({"op": "join", "host": _HOST, "port": store["port"]})
            self.facts: Mapping[str, Any] = ask(self._ranks, line, "ready", START_TIMEOUT_S)[0]
        except BaseException:
            self._drivers.close(failed=True)
            raise

    def ask(self, operation: str, timeout_s: float, **fields: object) -> list[Event]:
        """One answer of each rank, in their order."""
        return ask(self._ranks, json.dumps({"op": operation, **fields}), operation, timeout_s)

    def close(self, *, failed: bool) -> None:
        self._drivers.close(failed=failed)


def _command(module: str, rank: int, ranks: int, device: str, timeout_s: float) -> list[str]:
    return [
        *(sys.executable, "-m", module, f"--rank={rank}", f"--ranks={ranks}", f"--device={device}"),
        *(f"--timeout-s={timeout_s}", f"--parent-pid={os.getpid()}"),
    ]


def _environment(import_path: Sequence[Path]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    # The package is found where the parent found it, also when that is no installation.
    paths = [Path(bagua.__file__).resolve().parents[1], Path(__file__).resolve().parents[1], *import_path]
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = ":".join([*map(str, paths), *([inherited] if inherited else [])])
    environment["ENABLE_BAGUA_NET"] = "0"
    environment["OMP_NUM_THREADS"] = "1"
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A program that uses NVLink multicast can harm other users of a host's GPUs.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    return environment
