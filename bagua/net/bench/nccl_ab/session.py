"""The ranks of one backend, seen from rank 0, what they measure (collectives, and the sizes of their buffers), and
whether the largest case fits on every GPU. No torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua.net.bench.errors import BenchError
from bagua.net.bench.measurement import Case, Sample, busbw_factor
from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_log import NetworkProof, network_error
from bagua.net.bench.processes import DriverProcess, Endpoint, ask, gather
from bagua.net.bench.sizes import format_size
from bagua.net.bench.traffic import Traffic

GPU_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}

# These cut their buffer into one part for each rank, so its size is a multiple of the rank count.
SPLIT = ("all_gather", "reduce_scatter", "all_to_all")


def effective_bytes(collective: str, size_bytes: int, element_bytes: int, ranks: int) -> int:
    """The nearest size above that holds whole elements for every rank. The meaning of a size is nccl-tests': the
    larger of send and receive buffer."""
    unit = element_bytes * ranks if collective in SPLIT else element_bytes
    return -(-size_bytes // unit) * unit


def link_bytes(collective: str, size_bytes: int, ranks: int) -> int:
    """Bytes that cross connections in one operation, all ranks together, in NCCL's ring (or pairwise) patterns: busbw
    is what one rank's link carries, and all carry the same but in a broadcast, whose last rank sends nothing."""
    links = ranks - 1 if collective == "broadcast" else ranks * busbw_factor(collective, ranks)
    return round(size_bytes * links)


def buffer_bytes(collective: str, size_bytes: int, ranks: int) -> tuple[int, int]:
    """Bytes of the send and of the receive buffer; all_reduce and broadcast work in place."""
    if collective in ("all_reduce", "broadcast"):
        return 0, size_bytes
    part = size_bytes // ranks
    return {"all_gather": (part, size_bytes), "reduce_scatter": (size_bytes, part)}.get(collective, (size_bytes,) * 2)


def make_cases(collectives: Sequence[str], sizes: Sequence[int], element_bytes: int, ranks: int) -> list[Case]:
    """Sizes rounded to whole elements can meet (8 B of float32 on 4 ranks is 16 B): each is measured once."""
    return [
        Case(collective, size)
        for collective in collectives
        for size in dict.fromkeys(effective_bytes(collective, size, element_bytes, ranks) for size in sizes)
    ]


# Single iterations are timed for percentiles: more than this changes p99 little.
MAX_SINGLE = 200


@dataclass
class NcclSession:
    backend: Backend
    endpoints: Sequence[Endpoint] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)  # rank 0's torch, NCCL and device
    proofs: list[NetworkProof] = field(default_factory=list)
    failure: str | None = None  # the first; a session that failed takes no more turns

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

    def read_proofs(self, timeout_s: float) -> str | None:
        """Ask every rank what its NCCL log says; the error if it is not the backend's network."""
        line = json.dumps({"op": "proof"})
        events = ask(self.endpoints, line, "proof", timeout_s)
        self.proofs = [NetworkProof(**{name: event[name] for name in NetworkProof.__annotations__}) for event in events]
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
                # Its agent ends it; a lost agent's processes ended with it.
                with contextlib.suppress(BenchError):
                    endpoint.post("quit")
        self.close()


# The verification's work space (a handful of 32 MiB arrays), and connections that open with the first operation.
_BESIDE_BUFFERS = 512 << 20


def needed_bytes(case: Case, ranks: int) -> int:
    # Buffers below this are not what fills a GPU, and their verification needs less.
    return sum(buffer_bytes(case.collective, case.bytes, ranks)) + min(_BESIDE_BUFFERS, 16 * case.bytes)


def check_memory(
    sessions: Sequence[NcclSession], cases: Sequence[Case], timeout_s: float, ranks_per_gpu: int = 1
) -> None:
    """
    Raises:
        BenchError: a rank has too little; names the case, the need, the rank and the remedy.
    """
    alive = [session for session in sessions if session.is_alive]
    free: list[int] = []  # by rank
    for session in alive:
        # All backends have a process on each GPU and see the same. One that fails here fails at its next question, too.
        with contextlib.suppress(BenchError):
            events = ask(session.endpoints, json.dumps({"op": "memory"}), "memory", timeout_s)
            free = [int(event["free_bytes"]) for event in events]
            break
    else:
        return
    largest = max(cases, key=lambda case: needed_bytes(case, len(free)))
    needed = ranks_per_gpu * needed_bytes(largest, len(free))
    rank = min(range(len(free)), key=lambda index: free[index])
    if needed > free[rank]:
        raise BenchError(
            f"{largest.collective} of {format_size(largest.bytes)} needs {format_size(needed)} of memory on each GPU,"
            f" and rank {rank} has {format_size(free[rank])} left beside the processes of {len(alive)} backends;"
            " lower -e/--maxbytes, or run fewer backends (--tuned, --variant)"
        )
