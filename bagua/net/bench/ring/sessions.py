"""A backend's running drivers: ring sessions of W ranks, and raw TCP pairs; where the drivers of this host are started
from, and the processes of --busy-per-cpu beside them.

Owned by the run; everything is driven from its one thread, and all sessions but the one under way are idle.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bagua.net import native
from bagua.net.bench.driver import (
    RAW,
    DriverRequest,
    NetworkPath,
    check_baseline_library,
    choose_path,
    driver_settings,
    ring_memory_bytes,
)
from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.bench.measurement import Case, Sample
from bagua.net.bench.processes import Endpoint, Event, LocalPlace, Place, Processes, ask, gather
from bagua.net.bench.ranks import MakePlace, Ranks
from bagua.net.bench.ring.options import Options


def maker(options: Options, environment: Mapping[str, str]) -> MakePlace:
    return partial(_make, options, environment)


def own_ranks(options: Options, environment: Mapping[str, str]) -> Ranks:
    ranks = options.ranks or 2
    place, path = _make(options, environment, LOOPBACK, ranks)
    return Ranks.local(place, ranks, path)


def _make(
    options: Options, environment: Mapping[str, str], address: str, local_ranks: int
) -> tuple[LocalPlace, NetworkPath]:
    if options.library is None and any(name.startswith("plugin") for name in options.backends):
        # Another build may know other values.
        read = {name: value for name, value in environment.items() if name != "ENABLE_BAGUA_NET"}
        if refusals := native.refusals(read):
            raise BenchError("\n".join(refusals))
    path = choose_path(
        address=options.address, interface=options.interface, default_address=address, environment=environment
    )
    library = options.library if any(name.startswith("plugin") for name in options.backends) else Path()
    settings = driver_settings(options.driver, library, path, environment, local_ranks, options.timeout_s)
    baseline = options.baseline_library
    if baseline is not None:
        check_baseline_library(baseline)
        baseline = baseline.absolute()
    return LocalPlace(replace(settings, channels=options.channels, baseline_library=baseline)), path


# Reads, computes and writes 4 MiB again and again, as decoding does. What comes on stdin, or its end, ends it.
_PROGRAM = """\
import select, sys
print('{"event": "burning"}', flush=True)
work, table = bytes(4 << 20), bytes(range(1, 256)) + bytes(1)
while not select.select([sys.stdin], [], [], 0)[0]:
    work = work.translate(table)
"""


@contextlib.contextmanager
def busy_cpus(per_cpu: int, timeout_s: float, environment: Mapping[str, str]) -> Iterator[None]:
    """All of them are busy when this returns. They end with this process, however that ends."""
    count = per_cpu * len(os.sched_getaffinity(0))
    with Processes() as processes:
        command = [sys.executable, "-S", "-c", _PROGRAM]
        burning = [
            processes.start(f"busy process {index + 1} of {count}", command, environment) for index in range(count)
        ]
        gather(burning, "burning", timeout_s, "starting")
        yield


class RingSession:
    """W ranks that all-reduce in a ring: plugin, plugin-1, bare."""

    def __init__(self, name: str, places: Sequence[Place]) -> None:
        self.name = name
        self._endpoints: list[Endpoint] = [
            place.start(DriverRequest(name, rank, len(places))) for rank, place in enumerate(places)
        ]
        self._ranks = len(places)
        self.listening: list[Event] = []

    def connect(self, timeout_s: float) -> None:
        self.listening = gather(self._endpoints, "listening", timeout_s, "starting")
        handles = [" ".join(event["handles"]) for event in self.listening]
        for rank, endpoint in enumerate(self._endpoints):
            endpoint.post(f"connect {handles[(rank + 1) % self._ranks]}")
        gather(self._endpoints, "connected", timeout_s, "connecting to the next rank")

    def close(self) -> None:
        """In order, and all at the same time. Else they stay until the run ends."""
        for endpoint in self._endpoints:
            endpoint.post("quit")
        for endpoint in self._endpoints:
            endpoint.close()

    def run(self, case: Case, iterations: int, warmup: int, timeout_s: float) -> Sample:
        size_bytes = case.bytes
        results = ask(self._endpoints, f"run {size_bytes} {iterations} {warmup}", "result", timeout_s)
        for endpoint, result in zip(self._endpoints, results, strict=True):
            if result["bytes"] != size_bytes or len(result["seconds"]) != iterations:
                raise BenchError(
                    f"{endpoint.name} reports {len(result['seconds'])} iterations of {result['bytes']} B instead of"
                    f" {iterations} of {size_bytes} B; the driver and this package differ in version: reinstall bagua"
                )
        per_rank: list[list[float]] = [result["seconds"] for result in results]
        return Sample(
            iterations=iterations,
            seconds=max(sum(seconds) for seconds in per_rank) / iterations,
            iteration_seconds=tuple(max(ranks) for ranks in zip(*per_rank, strict=True)),
            cpu_seconds=sum(result["cpu_s"] for result in results),
            # Each of the W connections carries 2(W-1)/W of the buffer.
            moved_bytes=2 * (self._ranks - 1) * size_bytes * iterations,
        )

    def verify(self, case: Case, timeout_s: float) -> str:
        answers = ask(self._endpoints, f"verify {case.bytes}", "verified", timeout_s)
        return "; ".join(
            f"{endpoint.name}: {answer['wrong_elements']} wrong elements, first: {answer['first_wrong']}"
            for endpoint, answer in zip(self._endpoints, answers, strict=True)
            if answer["wrong_elements"] != 0
        )


class RawSession:
    """One raw TCP pair: client to server over a number of connections, a thread each.

    At each size both ends move the memory that a rank of the ring moves, again and again: how much of it fits into the
    CPUs' caches decides how fast TCP copies, and for how much CPU.
    """

    def __init__(
        self,
        streams: int,
        server: tuple[int, Place],
        client: tuple[int, Place],
        ranks: int,
        channels: int,
        largest_bytes: int,
        write_bytes: int = 0,
        listen: str = "",
    ) -> None:
        """`write_bytes`: of one call; 0: the driver's default, 1 MiB. Small transfers over many connections need less,
        or some connections have nothing to do at the end. `listen`: an address of the server's host, and otherwise the
        one of its place."""
        self.streams, self.name = streams, f"{RAW} x{streams}"
        self._ranks, self._channels = ranks, channels
        self._client_place = client
        memory_bytes = ring_memory_bytes(largest_bytes, ranks, channels)
        self._request = DriverRequest(RAW, server[0], ranks, "server", streams, "", memory_bytes, write_bytes, listen)
        self._server: Endpoint = server[1].start(self._request)
        self.listening: list[Event] = []
        self._client: Endpoint | None = None

    def connect(self, timeout_s: float) -> None:
        self.listening = gather([self._server], "listening", timeout_s, "starting")
        rank, place = self._client_place
        address = self.listening[0]["address"]
        self._client = place.start(replace(self._request, rank=rank, role="client", connect=address, listen=""))
        gather([self._server, self._client], "connected", timeout_s, f"connecting to {address}")

    def run(self, case: Case, iterations: int, warmup: int, timeout_s: float) -> Sample:
        """TCP knows no messages, so the iterations are one transfer."""
        assert self._client is not None, "connect() comes first"
        ends, size_bytes = [self._server, self._client], case.bytes
        memory_bytes = ring_memory_bytes(size_bytes, self._ranks, self._channels)
        if warmup:
            ask(ends, f"run {size_bytes * warmup} {memory_bytes}", "result", timeout_s)
        moved = size_bytes * iterations
        results = ask(ends, f"run {moved} {memory_bytes}", "result", timeout_s)
        return Sample(
            iterations=iterations,
            # The client's clock: from its first write to the server's word that all has arrived.
            seconds=results[1]["seconds"] / iterations,
            iteration_seconds=(),
            cpu_seconds=sum(result["cpu_s"] for result in results),
            moved_bytes=moved,
        )

    def verify(self, case: Case, timeout_s: float) -> None:
        return None


def default_raw_streams(cpus: int) -> list[int]:
    """1, 2, 4 ... and the number of CPUs: where one host's TCP peaks is not known beforehand."""
    streams = [1]
    while streams[-1] * 2 <= min(cpus, 64):
        streams.append(streams[-1] * 2)
    return streams if streams[-1] == min(cpus, 64) else [*streams, min(cpus, 64)]
