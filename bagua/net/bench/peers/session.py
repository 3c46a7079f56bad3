"""Two drivers with N comms each way between them: traffic that takes the comms in turn, and what it leaves behind.

Owned by the run; everything is driven from its one thread, and all sessions but the one under way are idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagua.net.bench.endpoint import Endpoint, Event, ask, gather
from bagua.net.bench.errors import BenchError
from bagua.net.bench.sample import Case, Sample

RANKS = 2
# Every comm carries this many messages before a figure is taken, and when data is verified.
ROUNDS = 2


@dataclass(frozen=True)
class ThreadUse:
    name: str
    cpu_s: float
    wakeups: int  # voluntary context switches: it went to sleep again as often as it woke


@dataclass(frozen=True)
class Footprint:
    """What one process holds at a moment."""

    threads: int
    descriptors: int
    tcp_sockets: int
    resident_bytes: int
    socket_memory_bytes: int
    # Every thread but the main one, which is the driver's own.
    others: Mapping[int, ThreadUse]

    @staticmethod
    def of(event: Event) -> Footprint:
        columns = (event[f"thread_{name}"] for name in ("ids", "names", "cpu_s", "voluntary_switches"))
        return Footprint(
            threads=event["threads"],
            descriptors=event["descriptors"],
            tcp_sockets=event["tcp_sockets"],
            resident_bytes=event["resident_bytes"],
            socket_memory_bytes=event["socket_memory_bytes"],
            others={
                int(thread): ThreadUse(name, cpu_s, int(wakeups))
                for thread, name, cpu_s, wakeups in zip(*columns, strict=True)
            },
        )


@dataclass(frozen=True)
class IdleCost:
    """What the threads of both processes did between two looks, without the drivers' own."""

    cpu_s: float
    wakeups: Mapping[str, int]  # by "rank 0 thread bagua-net-io0", those that woke

    @staticmethod
    def between(before: list[Footprint], after: list[Footprint]) -> IdleCost:
        cpu_s = 0.0
        wakeups = {}
        for rank, (old, new) in enumerate(zip(before, after, strict=True)):
            for thread, use in new.others.items():
                # One that was not there before has its whole life to answer for.
                earlier = old.others.get(thread, ThreadUse(use.name, 0.0, 0))
                cpu_s += use.cpu_s - earlier.cpu_s
                if use.wakeups != earlier.wakeups or thread not in old.others:
                    wakeups[f"rank {rank} thread {use.name} ({thread})"] = use.wakeups - earlier.wakeups
        return IdleCost(cpu_s, wakeups)


class PeersSession:
    def __init__(self, backend: str, comms: int, endpoints: list[Endpoint], least_messages: int) -> None:
        """endpoints[rank]: started drivers in peers mode. So many messages are verified at least."""
        self.backend = backend
        self.comms = comms
        self._verified_messages = max(least_messages, ROUNDS * comms)
        self._endpoints = endpoints
        self.listening: list[Event] = []

    @property
    def name(self) -> str:
        return f"{self.backend} x{self.comms}"

    def connect(self, timeout_s: float) -> None:
        self.listening = gather(self._endpoints, "listening", timeout_s, "starting")
        for endpoint, peer in zip(self._endpoints, reversed(self.listening), strict=True):
            endpoint.post("connect " + " ".join(peer["handles"]))
        gather(self._endpoints, "connected", timeout_s, f"connecting {self.comms} comms each way")

    def run(self, case: Case, iterations: int, warmup: int, timeout_s: float) -> Sample:
        """An iteration is a message each way."""
        results = ask(self._endpoints, f"run {case.bytes} {iterations} {warmup}", "result", timeout_s)
        for endpoint, result in zip(self._endpoints, results, strict=True):
            if (result["bytes"], result["messages"]) != (case.bytes, iterations):
                raise BenchError(
                    f"{endpoint.name} reports {result['messages']} messages of {result['bytes']} B instead of"
                    f" {iterations} of {case.bytes} B; the driver and this package differ in version: reinstall bagua"
                )
        return Sample(
            iterations=iterations,
            seconds=max(result["seconds"] for result in results) / iterations,
            iteration_seconds=(),
            cpu_seconds=sum(result["cpu_user_s"] + result["cpu_system_s"] for result in results),
            moved_bytes=RANKS * case.bytes * iterations,
        )

    def verify(self, case: Case, timeout_s: float) -> str:
        messages = self._verified_messages
        answers = ask(self._endpoints, f"verify {case.bytes} {messages}", "verified", timeout_s)
        return "; ".join(
            f"{endpoint.name}: {answer['wrong_elements']} wrong elements, first in message"
            f" {answer['first_wrong_message']} of {messages}"
            for endpoint, answer in zip(self._endpoints, answers, strict=True)
            if answer["wrong_elements"] != 0
        )

    def footprints(self, timeout_s: float) -> list[Footprint]:
        return [Footprint.of(event) for event in ask(self._endpoints, "footprint", "footprint", timeout_s)]

    def resident_growth(self, footprints: list[Footprint]) -> float:
        """Bytes of one process (the mean of the two) since before its first comm."""
        before: list[int] = [event["before_resident_bytes"] for event in self.listening]
        grown = [now.resident_bytes - then for now, then in zip(footprints, before, strict=True)]
        return sum(grown) / RANKS
