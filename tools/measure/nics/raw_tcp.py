"""What TCP alone carries over several NICs: the limit of what a transport can have of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from netlab import Lab

from bagua.net.bench.api import Case, RawSession
from measure.nics.lab_place import LabPlace
from measure.nics.nic_set import HOSTS, NicSet

_STREAMS = 4
_CHANNELS = 4
_PROBE_S = 0.05
_MEMORY_OF_BYTES = 64 << 20


class RawTcp:
    """Pairs of a server and a client on every NIC, in both directions, idle until asked. A context manager.

    Raises:
        BenchError: at once or later, when an end fails.
    """

    def __init__(self, nic_set: NicSet, lab: Lab, timeout_s: float, streams: int = _STREAMS) -> None:
        self._nic_set, self._timeout_s = nic_set, timeout_s
        self._places: list[LabPlace] = []
        self._pairs: list[list[RawSession]] = []
        try:
            for nic in range(len(nic_set.nics)):
                places = [
                    LabPlace(lab, host, nic_set.interfaces, nic=nic, timeout_s=timeout_s) for host in range(HOSTS)
                ]
                self._places += places
                pairs = []
                for host in range(HOSTS):
                    server, client = (host, places[host]), (1 - host, places[1 - host])
                    pairs.append(RawSession(streams, server, client, HOSTS, _CHANNELS, _MEMORY_OF_BYTES))
                for pair in pairs:
                    pair.connect(timeout_s)
                self._pairs.append(pairs)
        except BaseException:
            self.close(failed=True)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool) -> None:
        for place in self._places:
            place.close(failed=failed)

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
