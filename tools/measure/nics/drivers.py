"""Load drivers of the plugin on the two hosts of an emulated network: rings of joined and single NICs, and what TCP
alone carries over several NICs, which is the limit of what a transport can have of them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from netlab import Lab

from bagua.net.bench.api import (
    BenchError,
    Case,
    DriverProcess,
    DriverRequest,
    LocalPlace,
    NetworkPath,
    RawSession,
    RingSession,
    driver_settings,
    format_size,
    is_owned,
)
from measure.nics.nic_set import HOSTS, NicSet

_PROBE_RUNS = 2
_MOST_RUNS = 1000
# Of raw TCP.
_STREAMS = 4
_CHANNELS = 4
_PROBE_S = 0.05
_MEMORY_OF_BYTES = 64 << 20


class LabHost(LocalPlace):
    """One host. A ring's channels are spread over the devices that the plugin offers, as NCCL spreads its own.

    Args:
        interfaces: That the plugin may use.
        nic: On whose address a server of raw TCP listens.
    """

    def __init__(
        self,
        lab: Lab,
        host: int,
        interfaces: Sequence[str],
        *,
        nic: int = 0,
        settings: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if not is_owned(name)}
        path = NetworkPath(lab.hosts[host].address(nic), ",".join(interfaces))
        # All hosts share this machine's CPUs.
        of_one = driver_settings(None, None, path, {**inherited, **(settings or {})}, len(lab.hosts), timeout_s)
        super().__init__(dataclasses.replace(of_one, channels=max(2, len(interfaces))))
        self._lab, self._host = lab, host

    def start(self, request: DriverRequest) -> DriverProcess:
        command = self.settings.command(request)
        if request.role == "ring":
            command += ["--device", "all"]
        environment = self.settings.process_environment(request)
        return self._drivers.start(request.title, self._lab.entering(self._host, command), environment)


class DriverRanks:
    """A ring of two drivers: the plugin without NCCL, in the memory of the hosts. Raises BenchError."""

    def __init__(self, lab: Lab, interfaces: Sequence[str], settings: Mapping[str, str], timeout_s: float) -> None:
        self._lab, self._interfaces, self._settings, self._timeout_s = lab, interfaces, settings, timeout_s
        self._hosts: list[LabHost] = []
        self.facts: Mapping[str, Any] = {"device": "cpu", "threads": 1}

    def start(self) -> None:
        self._hosts = [
            LabHost(self._lab, host, self._interfaces, settings=self._settings, timeout_s=self._timeout_s)
            for host in range(HOSTS)
        ]
        self._session = RingSession("plugin", self._hosts)

    def form(self) -> None:
        self._session.connect(self._timeout_s)

    def all_reduce(self, size_bytes: int, seconds: float) -> float:
        """Seconds of one, of as many as take about `seconds`, one after the other, after one that is checked."""
        case = Case("all_reduce", size_bytes)
        self.verify(size_bytes)
        once = self._session.run(case, _PROBE_RUNS, 0, self._timeout_s).seconds
        count = min(_MOST_RUNS, max(_PROBE_RUNS, round(seconds / once)))
        return self._session.run(case, count, 0, self._timeout_s).seconds

    def verify(self, size_bytes: int) -> None:
        """One all-reduce, every byte of which is compared."""
        if wrong := self._session.verify(Case("all_reduce", size_bytes), self._timeout_s):
            raise BenchError(f"an all-reduce of {format_size(size_bytes)} is wrong: {wrong}")

    def devices(self) -> list[str]:
        """What each rank says of its devices."""
        return [" ".join(event["devices"]) for event in self._session.listening]

    def close(self, *, failed: bool) -> None:
        for host in self._hosts:
            host.close(failed=failed)


class RawTcp:
    """Pairs of a server and a client on every NIC, in both directions, idle until asked. A context manager.

    Raises:
        BenchError: at once or later, when an end fails.
    """

    def __init__(self, nic_set: NicSet, lab: Lab, timeout_s: float, streams: int = _STREAMS) -> None:
        self._nic_set, self._timeout_s = nic_set, timeout_s
        self._hosts: list[LabHost] = []
        self._pairs: list[list[RawSession]] = []
        try:
            for nic in range(len(nic_set.nics)):
                hosts = [LabHost(lab, host, nic_set.interfaces, nic=nic, timeout_s=timeout_s) for host in range(HOSTS)]
                self._hosts += hosts
                pairs = []
                for host in range(HOSTS):
                    server, client = (host, hosts[host]), (1 - host, hosts[1 - host])
                    pairs.append(RawSession(streams, server, client, HOSTS, _CHANNELS, _MEMORY_OF_BYTES))
                for pair in pairs:
                    pair.connect(timeout_s)
                self._pairs.append(pairs)
        except BaseException:
            self._close(failed=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(failed=kind is not None)

    def _close(self, *, failed: bool) -> None:
        for host in self._hosts:
            host.close(failed=failed)

    def rate(self, nics: Sequence[int], seconds: float) -> float:
        """Bytes per second of each direction over these NICs together, all directions at the same time, for about so
        many seconds."""
        known = {nic: self._nic_set.nics[nic].rate_mbit * 1e6 / 8 for nic in nics}
        probed = self._at_once({nic: rate * _PROBE_S for nic, rate in known.items()})
        rates = self._at_once({nic: rate * seconds for nic, rate in probed.items()})
        return sum(rates.values())

    def _at_once(self, transfers: dict[int, float]) -> dict[int, float]:
        """Of each NIC the mean of its directions, in bytes per second."""
        work = [(nic, pair, size) for nic, size in transfers.items() for pair in self._pairs[nic]]
        with ThreadPoolExecutor(len(work)) as pool:
            rates = list(pool.map(lambda one: (one[0], self._one(one[1], int(one[2]) + 1)), work))
        return {nic: sum(rate for of, rate in rates if of == nic) / HOSTS for nic in transfers}

    def _one(self, pair: RawSession, size_bytes: int) -> float:
        return size_bytes / pair.run(Case("one_way", size_bytes), 1, 0, self._timeout_s).seconds
