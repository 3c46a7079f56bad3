"""The cluster environment of the old launchers, which set BAGUA_SERVICE_PORT in addition to the variables of torch."""

from __future__ import annotations

import importlib
import os
from typing import Any

from bagua.lightning.packages import package_in_use

__all__ = ["BaguaEnvironment"]

_ClusterEnvironment: Any = importlib.import_module(f"{package_in_use()}.plugins.environments").ClusterEnvironment


class BaguaEnvironment(_ClusterEnvironment):  # type: ignore[misc]
    """Ranks that `bagua.distributed.launch`, `bagua.distributed.run` or `baguarun` has started."""

    @staticmethod
    def detect() -> bool:
        return "BAGUA_SERVICE_PORT" in os.environ

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "-1"))

    @property
    def service_port(self) -> int:
        return int(os.environ.get("BAGUA_SERVICE_PORT", "-1"))

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("NODE_RANK", "0"))
