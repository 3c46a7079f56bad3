"""Group: the worker processes of one backend, one a rank, seen from rank 0 as endpoints here or on other hosts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.endpoint import Endpoint, Event, ask, gather
from bagua.net.bench.errors import BenchError
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.plan import link_bytes
from bagua.net.bench.nccl_log import NetworkProof, network_error
from bagua.net.bench.sample import Case, Sample
from bagua.net.bench.traffic import Traffic

# Single iterations are timed for percentiles: more than this changes p99 little.
MAX_SINGLE = 200


@dataclass
class Group:
    backend: Backend
    endpoints: Sequence[Endpoint] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # rank 0's torch, NCCL and device
    proofs: list[NetworkProof] = field(default_factory=list)
    failure: str | None = None  # the first; a group that failed takes no more turns

    _salt: int = 0  # no two verifications look for the same data, so that a stale result is a wrong one

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def is_alive(self) -> bool:
        return self.failure is None

    def form(self, host: str, dtype: str, timeout_s: float) -> None:
        """All ranks join one process group over the store that rank 0 opened."""
        store = gather(self.endpoints[:1], "store", timeout_s, "starting")[0]
        line = json.dumps({"op": "join", "host": host, "port": store["port"], "dtype": dtype})
        self.facts = ask(self.endpoints, line, "ready", timeout_s)[0]

    def verify(self, case: Case, timeout_s: float) -> str:
        self._salt += 1
        line = json.dumps({"op": "verify", "collective": case.collective, "bytes": case.bytes, "salt": self._salt})
        return "; ".join(
            f"{event['wrong_elements']} wrong elements on rank {rank}, the first at {event['first_wrong']}"
            for rank, event in enumerate(ask(self.endpoints, line, "verify", timeout_s))
            if event["wrong_elements"]
        )

    def run(self, case: Case, iterations: int, warmup: int, timeout_s: float) -> Sample:
        command = {"op": "time", "collective": case.collective, "bytes": case.bytes}
        command |= {"iterations": iterations, "warmup": warmup}
        command["single"] = min(iterations, MAX_SINGLE) if case.wants_latency else 0
        events = ask(self.endpoints, json.dumps(command), "time", timeout_s)
        return Sample(
            iterations=iterations,
            seconds=max(event["seconds"] for event in events) / iterations,
            iteration_seconds=tuple(map(max, zip(*(event["single_seconds"] for event in events), strict=True))),
            cpu_seconds=sum(event["cpu_seconds"] for event in events),
            moved_bytes=link_bytes(case.collective, case.bytes, len(events)) * iterations,
        )

    def free_bytes(self, timeout_s: float) -> list[int]:
        """By rank: the memory that is left on its GPU."""
        events = ask(self.endpoints, json.dumps({"op": "memory"}), "memory", timeout_s)
        return [int(event["free_bytes"]) for event in events]

    def read_proofs(self, timeout_s: float) -> str | None:
        """Ask every rank what its NCCL log says; the error if it is not the backend's network."""
        line = json.dumps({"op": "proof"})
        self.proofs = [_proof(event) for event in ask(self.endpoints, line, "proof", timeout_s)]
        return network_error(self.backend.name, self.backend.network, self.proofs)

    def traffic(self, timeout_s: float) -> list[Traffic]:
        """By rank: of its host, in the busiest turn."""
        events = ask(self.endpoints, json.dumps({"op": "traffic"}), "traffic", timeout_s)
        return [Traffic(**{name: event[name] for name in Traffic.__annotations__}) for event in events]

    def leave(self, timeout_s: float) -> None:
        """Destroy the process group in order, which is when the plugin closes its connections and threads."""
        ask(self.endpoints, json.dumps({"op": "quit"}), "bye", timeout_s)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
        self.endpoints = ()

    def fail(self, error: BenchError | str) -> None:
        """Remember why, and end the processes: ranks stuck in a collective would hold their GPUs."""
        self.failure = str(error)
        for endpoint in self.endpoints:
            if isinstance(endpoint, DriverProcess):
                endpoint.kill()
            else:
                # Its agent ends it; a lost agent's workers ended with it.
                with contextlib.suppress(BenchError):
                    endpoint.post("quit")
        self.close()


def _proof(event: Event) -> NetworkProof:
    nodes = event["nodes"]
    return NetworkProof(
        network=event["network"],
        table=event["table"],
        channels=event["channels"],
        nodes=nodes if isinstance(nodes, int) else None,
        transports=tuple(event["transports"]),
        plugin_lines=tuple(event["plugin_lines"]),
        warnings=tuple(event["warnings"]),
    )
