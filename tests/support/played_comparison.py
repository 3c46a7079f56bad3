"""The run of the GPU comparison on a stage: workers that are played, in a time of their own."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.net.bench.nccl_ab.backend import Backend
from bagua.net.bench.nccl_ab.session import MAX_SINGLE, NcclSession, make_cases
from bagua.net.bench.paced_run import Pace, PacedRun
from bagua.net.bench.processes import Event
from bagua.progress import Progress

CASES = make_cases(["all_reduce"], [1024, 1 << 20], 4, 2)


class PlayedWorker:
    """An endpoint whose worker takes `seconds` for an iteration, in a time of its own."""

    def __init__(
        self, name: str, network: str, seconds: float, seconds_by_size: Mapping[int, float], stage: Stage
    ) -> None:
        self.name = name
        self.network = network
        self.seconds = seconds  # of an iteration, unless its size is in
        self.seconds_by_size = seconds_by_size
        self.free_bytes = 1 << 40
        self.wrong_at: int | None = None  # the verification, counted from 1, that finds a wrong element
        self.dies_at: int | None = None  # the timed turn, counted from 1, at which it ends
        self.posted: list[dict[str, Any]] = []
        self.closed = False
        self._stage = stage
        self._answers: list[Event] = []

    def fileno(self) -> int:
        raise AssertionError("a played worker answers at once; nothing should wait for it")

    def post(self, line: str) -> None:
        if line == "quit":
            return
        command = json.loads(line)
        self.posted.append(command)
        self._answers.append(self._answer(command))

    def _count(self, operation: str) -> int:
        return sum(command["op"] == operation for command in self.posted)

    def _answer(self, command: dict[str, Any]) -> Event:
        if command["op"] == "proof":
            return {
                "event": "proof",
                "network": self.network,
                "table": None,
                "channels": None,
                "nodes": 2,
                "transports": [],
                "plugin_lines": [],
                "warnings": [],
            }
        if command["op"] == "traffic":
            return {
                "event": "traffic",
                "interface": "eth0",
                "nbytes": 1,
                "peak_bytes_per_s": 1e9,
                "speed_bytes_per_s": None,
            }
        if command["op"] == "memory":
            return {"event": "memory", "free_bytes": self.free_bytes}
        seconds = self.seconds_by_size.get(command["bytes"], self.seconds)
        if command["op"] == "verify":
            self._pass(seconds)
            wrong = self._count("verify") == self.wrong_at
            return {"event": "verify", "wrong_elements": int(wrong), "first_wrong": 17 if wrong else None}
        if self._count("time") == self.dies_at:
            return {"event": "error", "message": "the network broke"}
        operations = command["iterations"] + command["warmup"] + command["single"]
        self._pass(seconds * operations)
        return {
            "event": "time",
            "seconds": seconds * command["iterations"],
            "single_seconds": [seconds] * command["single"],
            "cpu_seconds": 0.5,
        }

    def _pass(self, seconds: float) -> None:
        """The ranks of a session work at the same time; the first one's counts."""
        if self.name.endswith(" 0"):
            self._stage.now += seconds

    def next_event(self) -> Event | None:
        return self._answers.pop(0)

    def close(self) -> None:
        self.closed = True


DEFAULT = Backend("NCCL default", "Socket")
TUNED = Backend("NCCL t2s2", "Socket")
OURS = Backend("bagua-net", "BaguaNet", is_ours=True)
THREE = ((DEFAULT, 0.004), (TUNED, 0.002), (OURS, 0.001))


class Stage:
    """Backends of two ranks each, and their clock. What each needs for an iteration: seconds, by size or always."""

    def __init__(self, backends: Sequence[tuple[Backend, float | Mapping[int, float]]] = THREE) -> None:
        self.now = 0.0
        self.messages = io.StringIO()
        self._workers: list[list[PlayedWorker]] = []
        self.sessions = [self._session(backend, seconds) for backend, seconds in backends]

    def _session(self, backend: Backend, seconds: float | Mapping[int, float]) -> NcclSession:
        always, by_size = (seconds, {}) if isinstance(seconds, float) else (1e-3, seconds)
        workers = [PlayedWorker(f"{backend.name} {rank}", backend.network, always, by_size, self) for rank in (0, 1)]
        self._workers.append(workers)
        return NcclSession(backend, endpoints=workers)

    def worker(self, session: int, rank: int) -> PlayedWorker:
        return self._workers[session][rank]

    def run(self, *, give_up: bool = True, **changes: Any) -> PacedRun:
        values: dict[str, Any] = {"rounds": 3, "turn_s": 0.4, "timeout_s": 5.0, "time_limit_s": 1000.0}
        values |= {"single": MAX_SINGLE, "verifies_twice": True, "limit": "--time-limit 9"}
        by_name = {session.name: session for session in self.sessions}
        run = PacedRun(
            dict.fromkeys(CASES, self.sessions),
            Pace(**(values | changes)),
            lambda n: Progress(n, stream=self.messages),
            give_up=(lambda session, error: by_name[session.name].fail(error)) if give_up else None,
            clock=lambda: self.now,
        )
        run.run()
        run.verify()
        return run
