"""Two ranks in one setup, on the hosts of an emulated network: load drivers, or ranks of NCCL with a GPU each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from netlab import Lab

from bagua.net.bench.api import BenchError, Case, RingSession, format_size
from measure.core.catalogue import REFERENCE
from measure.core.ranks import network_fault, start_on_network
from measure.nics.lab_place import LabPlace
from measure.nics.nic_set import HOSTS, NicSet
from measure.nics.setups import Setup
from measure.ranks.lab_placement import LabPlacement

_PROBE_RUNS = 2
_MOST_RUNS = 1000


class LabRanks(Protocol):
    """Started by the main thread; everything raises BenchError when a rank fails."""

    def form(self) -> None:
        """Connects the ranks. Any thread; once."""

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def all_reduce(self, size_bytes: int, seconds: float) -> float:
        """Seconds of one, of as many as take about `seconds`, one after the other, after one whose sum is checked."""

    def fault(self, where: str) -> str | None:
        """What of the setup is not there: its network, or the joined device."""

    def close(self, *, failed: bool) -> None: ...


def _not_joined(where: str, nic_set: NicSet, said: list[str]) -> str | None:
    device = "+".join(nic_set.interfaces)
    missing = [rank for rank, text in enumerate(said) if device not in text]
    return f"{where}: rank {missing[0]} has no device {device}" if missing else None


class DriverRanks:
    """bagua-net-driver: the plugin without NCCL, in the memory of the host."""

    def __init__(self, nic_set: NicSet, setup: Setup, lab: Lab, timeout_s: float) -> None:
        interfaces = nic_set.interfaces if setup.all_nics else nic_set.interfaces[:1]
        self._nic_set, self._setup, self._timeout_s = nic_set, setup, timeout_s
        self.places = [
            LabPlace(lab, host, interfaces, settings=setup.backend.settings, timeout_s=timeout_s)
            for host in range(HOSTS)
        ]
        self.session = RingSession("plugin", self.places)
        self.facts: Mapping[str, Any] = {"device": "cpu", "threads": 1}

    def form(self) -> None:
        self.session.connect(self._timeout_s)

    def all_reduce(self, size_bytes: int, seconds: float) -> float:
        case = Case("all_reduce", size_bytes)
        self.verify(size_bytes)
        once = self.session.run(case, _PROBE_RUNS, 0, self._timeout_s).seconds
        count = min(_MOST_RUNS, max(_PROBE_RUNS, round(seconds / once)))
        return self.session.run(case, count, 0, self._timeout_s).seconds

    def verify(self, size_bytes: int) -> None:
        """One all-reduce, every byte of which is compared. Raises BenchError: a byte is wrong."""
        if wrong := self.session.verify(Case("all_reduce", size_bytes), self._timeout_s):
            raise BenchError(f"an all-reduce of {format_size(size_bytes)} is wrong: {wrong}")

    def fault(self, where: str) -> str | None:
        if not self._setup.joins:
            return None
        return _not_joined(where, self._nic_set, [" ".join(event["devices"]) for event in self.session.listening])

    def close(self, *, failed: bool) -> None:
        for place in self.places:
            place.close(failed=failed)


class GpuRanks:
    """Ranks of torch with NCCL; they can also train."""

    def __init__(self, given: argparse.Namespace, nic_set: NicSet, setup: Setup, lab: Lab, logs: Path) -> None:
        self._nic_set, self._setup, self._timeout_s = nic_set, setup, given.timeout
        gpus = given.ranks if given.sharing is None else given.sharing.gpus
        placement = LabPlacement(lab, gpus=gpus, interfaces=None if setup.all_nics else nic_set.interfaces[:1])
        options = argparse.Namespace(**{**vars(given), "algorithms": (REFERENCE,), "deterministic": True})
        logs.mkdir(parents=True, exist_ok=True)
        self.team, self._logs = start_on_network(
            options, setup.backend, logs, tcp_only=True, placement=placement, form=False
        )

    def form(self) -> None:
        self.team.form()

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.team.facts

    def all_reduce(self, size_bytes: int, seconds: float) -> float:
        events = self.team.ask("all_reduce", self._timeout_s, size_bytes=size_bytes, seconds=seconds)
        return max(event["seconds"] for event in events)

    def fault(self, where: str) -> str | None:
        if wrong := network_fault(where, self._setup.backend, self._logs):
            return wrong
        if not self._setup.joins:
            return None
        return _not_joined(where, self._nic_set, [log.read_text(errors="replace") for log in self._logs])

    def close(self, *, failed: bool) -> None:
        self.team.close(failed=failed)
