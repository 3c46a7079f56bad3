"""The ranks of a trial meet at a store of rank 0, and exchange what they know."""

from __future__ import annotations

import datetime
import importlib
import json
import time
from collections.abc import Callable
from typing import Any

from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LaunchEnvironment

_POLL_S = 0.05
_FAILED = "failed"
_LEAVE_S = 10.0


class RelayedError(BenchError):
    """Another rank has failed; the text is that rank's."""


class Meeting:
    """
    Raises:
        BenchError: of all methods: another rank failed, or did not come in time.
    """

    def __init__(self, launch: LaunchEnvironment, wait_s: float) -> None:
        self.launch = launch
        distributed: Any = importlib.import_module("torch.distributed")
        where = f"{launch.master_address}, port {launch.port}"
        try:
            self.store: Any = distributed.TCPStore(
                launch.master_address,
                launch.port,
                is_master=launch.rank == 0,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=wait_s),
            )
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            if launch.rank == 0:
                raise BenchError(
                    f"rank 0 cannot listen on port {launch.port}: {first}\n"
                    "Another process may use it; choose another MASTER_PORT (the port is one above it)."
                ) from error
            raise BenchError(
                f"rank {launch.rank} did not reach rank 0 at {where}, within {wait_s:g} s: {first}\n"
                "Start the same command on every node, and open this port between them."
            ) from error

    def gather(
        self, name: str, value: object, wait_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """What each rank gives under this name, in the order of the ranks."""
        keys = [f"{name}/{rank}" for rank in range(self.launch.world_size)]
        self.store.set(keys[self.launch.rank], json.dumps(value))
        self._await(keys, wait_s, meanwhile)
        return [json.loads(self.store.get(key)) for key in keys]

    def decide(self, name: str, value: bool, wait_s: float) -> bool:
        """What rank 0 gives."""
        if self.launch.rank == 0:
            self.store.set(name, json.dumps(value))
        self._await([name], wait_s, lambda: None)
        return bool(json.loads(self.store.get(name)))

    def _await(self, keys: list[str], wait_s: float, meanwhile: Callable[[], None]) -> None:
        deadline = time.monotonic() + wait_s
        while not self.store.check(keys):
            self.check()
            meanwhile()
            if time.monotonic() > deadline:
                absent = [key.rpartition("/")[2] for key in keys if not self.store.check([key])]
                ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)} of {self.launch.world_size}"
                raise BenchError(
                    f"{ranks} did not come within {wait_s:g} s\n"
                    "Start the same command on every node; the output of the missing ranks says why they ended."
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises RelayedError with what the first rank that failed has said."""
        if self.store.check([_FAILED]):
            raise RelayedError(self.store.get(_FAILED).decode())

    def fail(self, text: str) -> None:
        if not self.store.check([_FAILED]):
            self.store.set(_FAILED, text)

    def leave(self) -> None:
        """Rank 0 is the last: the store ends with it."""
        keys = [f"left/{rank}" for rank in range(self.launch.world_size)]
        self.store.set(keys[self.launch.rank], "")
        deadline = time.monotonic() + _LEAVE_S
        while self.launch.rank == 0 and not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
